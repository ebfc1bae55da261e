-- Renews the lead for ARGV[2] milliseconds (0 gives it up), if its token is still ARGV[1].
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
