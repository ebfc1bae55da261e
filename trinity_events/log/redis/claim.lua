-- Gives a member the entries that stayed pending with any member for too long. An entry that was
-- delivered too often is acknowledged and becomes a dead letter. A trimmed entry is acknowledged.
-- KEYS: stream, dead
-- ARGV: group, member, milliseconds, most deliveries, limit, dead letters kept, bytes of each
local claimed, dead = {}, {}
local pending =
  redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', ARGV[5])
for _, one in ipairs(pending) do
  local id, times = one[1], one[4]
  if times < tonumber(ARGV[4]) then
    local taken = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id)[1]
    if taken then claimed[#claimed + 1] = taken end
  else
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if entry then
      local payload = ''
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'e' then payload = entry[2][i + 1] end
      end
      local reason =
        'group ' .. ARGV[1] .. ': delivered ' .. times .. ' times and never acknowledged'
      redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*',
        'id', id, 'reason', reason, 'e', payload:sub(1, tonumber(ARGV[7])))
      dead[#dead + 1] = entry
    end
    redis.call('XACK', KEYS[1], ARGV[1], id)
  end
end
return {claimed, dead}
