-- How the groups of a stream stand: name, pending, last delivered, oldest pending or '',
-- milliseconds idle, members.
-- KEYS: stream   ARGV: the member that a group is created with
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local function named(list)
  local fields = {}
  for i = 1, #list, 2 do fields[list[i]] = list[i + 1] end
  return fields
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(info)
  local name, last = group['name'], group['last-delivered-id']
  -- One that was created without a member, not by us: since what it was last given.
  local idle, members = now - tonumber(last:match('^%d+')), 0
  for number, member in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], name)) do
    local fields = named(member)
    if fields['name'] ~= ARGV[1] then members = members + 1 end
    if number == 1 or fields['idle'] < idle then idle = fields['idle'] end
  end
  local oldest = redis.call('XPENDING', KEYS[1], name)[2] or ''
  found[#found + 1] = {name, group['pending'], last, oldest, idle, members}
end
return found
