-- Marks checkpoints without a lease for deletion, for the newest leader alone; returns them.
-- KEYS: holds, doomed, fence   ARGV: token, steps
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local held = {}
for _, one in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do held[one:match('^%d+')] = true end
local doomed = {}
for i = 2, #ARGV do
  if not held[ARGV[i]] then
    redis.call('SADD', KEYS[2], ARGV[i])
    doomed[#doomed + 1] = ARGV[i]
  end
end
return doomed
