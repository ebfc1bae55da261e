-- Deletes the keys of a run, unless a reducer leads it or its log has gone on; returns their number.
-- KEYS: events, leader, then every key to delete   ARGV: last entry of the events, or '0-0'
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if (last[1] and last[1][1] or '0-0') ~= ARGV[1] then return -2 end
local deleted = 0
for i = 3, #KEYS do deleted = deleted + redis.call('UNLINK', KEYS[i]) end
return deleted
