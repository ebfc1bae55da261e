-- Writes the samples of an answer, acknowledges its request and deletes it; or does nothing, if the
-- request was answered, replaced or withdrawn before. Returns 1 if the answer counts.
-- KEYS: epoch, rollouts, experiences   ARGV: epoch, group, id of the request, samples
--include fence
redis.call('XLEN', KEYS[3]) -- fails before the first write if the key is no stream
if redis.call('XACK', KEYS[2], ARGV[2], ARGV[3]) == 0 then return 0 end
redis.call('XDEL', KEYS[2], ARGV[3])
for i = 4, #ARGV do redis.call('XADD', KEYS[3], '*', 'e', ARGV[i]) end
return 1
