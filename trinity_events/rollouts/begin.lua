-- Makes the epoch's consumer group, and withdraws all requests with their groups; with ARGV[3] the
-- answers too. Returns the last id of the requests. A member that waits in a removed group gets
-- an error with NOGROUP.
-- KEYS: epoch, rollouts, experiences   ARGV: epoch, group, 1 to withdraw the answers
--include fence
redis.call('XLEN', KEYS[3]) -- fails before the first write if the key is no stream
local last = '0-0'
if redis.call('EXISTS', KEYS[2]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do if info[i] == 'last-generated-id' then last = info[i + 1] end end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[2])) do
    redis.call('XGROUP', 'DESTROY', KEYS[2], group[2])
  end
end
if tonumber(last:match('^%d+')) > tonumber(ARGV[1]) then -- a foreign id: ours would be refused
  redis.call('DEL', KEYS[2])
  last = '0-0'
else
  redis.call('XTRIM', KEYS[2], 'MAXLEN', 0)
end
if ARGV[3] == '1' then redis.call('XTRIM', KEYS[3], 'MAXLEN', 0) end
redis.call('XGROUP', 'CREATE', KEYS[2], ARGV[2], '0', 'MKSTREAM')
return last
