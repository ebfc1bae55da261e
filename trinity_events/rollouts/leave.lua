-- Removes members of a group that hold no claim and have asked for nothing for a while; all such, or
-- only one. Returns their number. A member that asks again is made anew.
-- KEYS: epoch, rollouts   ARGV: epoch, group, milliseconds, member or ''
--include fence
local members = redis.pcall('XINFO', 'CONSUMERS', KEYS[2], ARGV[2])
if members.err then return 0 end
local removed = 0
for _, member in ipairs(members) do
  local said = {}
  for i = 1, #member, 2 do said[member[i]] = member[i + 1] end
  local named = ARGV[4] == '' or ARGV[4] == said.name
  if named and said.pending == 0 and said.idle >= tonumber(ARGV[3]) then
    -- Rules of access may forbid it: then the member stays until the epoch ends.
    local done = redis.pcall('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[2], said.name)
    if type(done) == 'number' then removed = removed + 1 end
  end
end
return removed
