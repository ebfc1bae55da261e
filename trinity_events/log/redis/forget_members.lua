-- Removes idle members with nothing pending, but never the member that read last: it shows how
-- long the group has been idle.
-- KEYS: stream   ARGV: group, milliseconds
--include helpers
local members = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if members.err then return 0 end
local idle, freshest = {}, nil
for number, member in ipairs(members) do
  local fields = named(member)
  idle[number] = fields
  if not freshest or fields['idle'] < freshest['idle'] then freshest = fields end
end
local forgotten = 0
for _, fields in ipairs(idle) do
  if fields ~= freshest and fields['pending'] == 0 and fields['idle'] >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], fields['name'])
    forgotten = forgotten + 1
  end
end
return forgotten
