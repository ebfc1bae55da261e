-- Raises the counter of epochs to the newest folded epoch, for the newest leader alone.
-- It returns the counter as it was. An event may open an epoch without taking its number; the next
-- opening would get a number that the fold refuses as stale.
-- KEYS: epoch, fence   ARGV: token, newest folded epoch
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return false end
local present = tonumber(redis.call('GET', KEYS[1]) or '0')
if present < tonumber(ARGV[2]) then redis.call('SET', KEYS[1], ARGV[2]) end
return present
