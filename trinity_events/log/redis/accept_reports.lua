-- Moves reports into the events, whole or not at all: only for the newest leader (the fence), and
-- only from the position that it read from. After a lost reply a retry is therefore safe: the
-- position has moved, and the reducer reads it again.
-- The script checks the types of all keys before it writes, as the commit does. What it moved is
-- removed from the reports, so that they do not grow.
-- KEYS: reported, fence, reports, events, dead
-- ARGV: token, after, position, dead letters kept, n, n * payload, m * (id, reason, payload)
local kept = {'string', 'string', 'stream', 'stream', 'stream'}
for i, key in ipairs(KEYS) do
  local found = redis.call('TYPE', key)['ok']
  if found ~= 'none' and found ~= kept[i] then
    return redis.error_reply(
      'WRONGTYPE ' .. key .. ' is a ' .. found .. ', where the log keeps a ' .. kept[i])
  end
end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 'fenced' end
if (redis.call('GET', KEYS[1]) or '0-0') ~= ARGV[2] then return 'moved' end
-- A writer of dead letters may choose ids: an error at one would leave the writes before it, which each
-- retry would repeat. The next leader mends the stream.
--include helpers
if is_exhausted(KEYS[5]) then
  return redis.error_reply('ERR the stream of dead letters has exhausted the last possible ID')
end
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  redis.call('XADD', KEYS[4], '*', 'e', ARGV[at])
  at = at + 1
end
while at < #ARGV do
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*',
    'id', ARGV[at], 'reason', ARGV[at + 1], 'e', ARGV[at + 2])
  at = at + 3
end
redis.call('SET', KEYS[1], ARGV[3])
redis.call('XTRIM', KEYS[3], 'MINID', ARGV[3])
return 'ok'
