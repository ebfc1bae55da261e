-- Marks checkpoints without a lease for deletion, for the newest leader alone; returns them.
-- KEYS: holds, doomed, fence   ARGV: token, steps
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
-- Rules of access let readers add leases of any name and end. Each ends ten minutes from now at the latest,
-- unless its reader renews it, and one that names no step holds nothing.
local latest = now + 600000
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. latest, '+inf')) do
  redis.call('ZADD', KEYS[1], latest, lease)
end
local held = {}
for _, lease in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  held[lease:match('^(%d+) ') or ''] = true
end
local doomed = {}
for i = 2, #ARGV do
  if not held[ARGV[i]] then
    redis.call('SADD', KEYS[2], ARGV[i])
    doomed[#doomed + 1] = ARGV[i]
  end
end
return doomed
