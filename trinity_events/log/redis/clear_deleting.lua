-- Clears deletion marks, for the newest leader alone.
-- KEYS: doomed, fence   ARGV: token, steps or 'all'
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
if ARGV[2] == 'all' then redis.call('DEL', KEYS[1]) end
for i = 2, #ARGV do redis.call('SREM', KEYS[1], ARGV[i]) end
return 1
