-- Removes a group, for the newest leader alone. KEYS: stream, fence   ARGV: token, group
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('XGROUP', 'DESTROY', KEYS[1], ARGV[2]) end
return 1
