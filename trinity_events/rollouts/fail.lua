-- Gives a request back unanswered, and tells the trainer in the stream of answers; or does nothing,
-- if the request was answered, replaced or withdrawn before. Returns 1 if the failure counts.
-- KEYS: epoch, rollouts, experiences
-- ARGV: epoch, group, id of the request, reason, name of the explorer, then the error of its reward, or nothing,
-- and, if what its answer depends on failed, the name of that and 1 if it was not reached
--include fence
--include takes_entries
if redis.call('XACK', KEYS[2], ARGV[2], ARGV[3]) == 0 then return 0 end
redis.call('XDEL', KEYS[2], ARGV[3])
local fields = {'failed', ARGV[3], 'reason', ARGV[4], 'explorer', ARGV[5]}
if ARGV[6] and ARGV[6] ~= '' then
  fields[#fields + 1] = 'error'
  fields[#fields + 1] = ARGV[6]
end
if ARGV[7] then
  fields[#fields + 1] = 'dependency'
  fields[#fields + 1] = ARGV[7]
  fields[#fields + 1] = 'unreachable'
  fields[#fields + 1] = ARGV[8]
end
redis.call('XADD', KEYS[3], '*', unpack(fields))
return 1
