-- Hides a part from new readers, and frees it unless a reader holds a lease; returns the leases.
-- A reader takes its lease before it looks for the manifest, so that none is missed.
-- KEYS: manifest, leases, chunks   ARGV: milliseconds for which what is read stays at most
local fresh = redis.call('UNLINK', KEYS[1]) == 1
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local readers = redis.call('ZCARD', KEYS[2])
for i = 3, #KEYS do
  if readers == 0 then
    redis.call('UNLINK', KEYS[i])
  elseif fresh then
    redis.call('PEXPIRE', KEYS[i], ARGV[1])
  end
end
return readers
