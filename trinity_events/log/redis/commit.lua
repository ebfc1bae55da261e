-- Writes one step of the reducer, whole or not at all: only for the newest leader (the fence),
-- and only from the position that it folded from. After a lost reply a retry is therefore safe:
-- the position has moved, and the reducer reloads.
-- The script checks the types of all keys before it writes. An error in the middle would leave
-- the writes before it, and each retry would repeat them.
-- KEYS: position, fence, announcements, dead, snapshot, current, grant keys
-- ARGV: token, after, position, snapshot or '', dead letters kept, milliseconds of a grant,
--       k, k * retracted subject, n, n * (subject or '', payload), m * (id, reason, payload)
local kept = {'string', 'string', 'stream', 'stream', nil, 'hash'} -- snapshot: any
for i, key in ipairs(KEYS) do
  local wanted = kept[i] or i > 6 and 'stream' or nil
  local found = redis.call('TYPE', key)['ok']
  if wanted and found ~= 'none' and found ~= wanted then
    return redis.error_reply(
      'WRONGTYPE ' .. key .. ' is a ' .. found .. ', where the log keeps a ' .. wanted)
  end
end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 'fenced' end
if (redis.call('GET', KEYS[1]) or '0-0') ~= ARGV[2] then return 'moved' end
-- A writer of dead letters may choose ids: an error at one would leave the writes before it, which each
-- retry would repeat. The next leader mends the stream.
--include helpers
if is_exhausted(KEYS[4]) then
  return redis.error_reply('ERR the stream of dead letters has exhausted the last possible ID')
end
local at = 8
for _ = 1, tonumber(ARGV[7]) do
  redis.call('HDEL', KEYS[6], ARGV[at])
  at = at + 1
end
local announcements = tonumber(ARGV[at])
at = at + 1
for _ = 1, announcements do
  local id = redis.call('XADD', KEYS[3], '*', 'e', ARGV[at + 1])
  if ARGV[at] ~= '' then redis.call('HSET', KEYS[6], ARGV[at], id .. ' ' .. ARGV[at + 1]) end
  at = at + 2
end
while at < #ARGV do
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[5], '*',
    'id', ARGV[at], 'reason', ARGV[at + 1], 'e', ARGV[at + 2])
  at = at + 3
end
for i = 7, #KEYS do
  redis.call('XADD', KEYS[i], '*', 'e', '')
  redis.call('PEXPIRE', KEYS[i], ARGV[6])
end
redis.call('SET', KEYS[1], ARGV[3])
if ARGV[4] ~= '' then redis.call('SET', KEYS[5], ARGV[4]) end
return 'ok'
