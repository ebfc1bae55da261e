-- Removes members without a claim that were idle for long; a member that returns is made anew.
-- KEYS: epoch, rollouts   ARGV: epoch, group, milliseconds
--include fence
local members = redis.pcall('XINFO', 'CONSUMERS', KEYS[2], ARGV[2])
if members.err then return 0 end
local forgotten = 0
for _, member in ipairs(members) do
  local fields = {}
  for i = 1, #member, 2 do fields[member[i]] = member[i + 1] end
  if fields['pending'] == 0 and fields['idle'] >= tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[2], fields['name'])
    forgotten = forgotten + 1
  end
end
return forgotten
