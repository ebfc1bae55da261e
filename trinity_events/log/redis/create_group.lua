-- Creates a group, with a first member that counts its idle time until other members read.
-- KEYS: stream   ARGV: group, position, member
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2], 'MKSTREAM')
if made.err and made.err:find('BUSYGROUP', 1, true) then return 0 end
if made.err then return made end
return redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[3])
