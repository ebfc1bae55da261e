-- Returns the state of each group of a stream: name, pending, last delivered, oldest pending or '',
-- milliseconds idle, members, 1 if every entry was delivered.
-- KEYS: stream   ARGV: the member that a group is created with
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
--include helpers
local found = {}
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(info)
  local name, last = group['name'], group['last-delivered-id']
  local idle, members = 0, 0
  local consumers = redis.call('XINFO', 'CONSUMERS', KEYS[1], name)
  if #consumers == 0 then
    -- Another program created it, at an unknown time: it gets the first member of our groups.
    redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], name, ARGV[1])
  end
  for number, member in ipairs(consumers) do
    local fields = named(member)
    if fields['name'] ~= ARGV[1] then members = members + 1 end
    if number == 1 or fields['idle'] < idle then idle = fields['idle'] end
  end
  local oldest = redis.call('XPENDING', KEYS[1], name)[2] or ''
  -- Another program may have set a group beyond any position: then no entry can follow.
  local undelivered = redis.pcall('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', 1)
  local given = (undelivered.err or #undelivered == 0) and 1 or 0
  found[#found + 1] = {name, group['pending'], last, oldest, idle, members, given}
end
return found
