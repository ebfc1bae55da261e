-- Makes the epoch's consumer group, and withdraws the requests of other epochs with their groups.
-- Returns the last id of the stream. An explorer that waits in a removed group gets NOGROUP.
-- KEYS: epoch, rollouts   ARGV: epoch, group, 1 to withdraw the requests of this epoch too
--include fence
local last, groups = '0-0', {}
if redis.call('EXISTS', KEYS[2]) == 1 then
  for i, value in ipairs(redis.call('XINFO', 'STREAM', KEYS[2])) do
    if value == 'last-generated-id' then
      last = redis.call('XINFO', 'STREAM', KEYS[2])[i + 1]
    end
  end
  groups = redis.call('XINFO', 'GROUPS', KEYS[2])
end
for _, group in ipairs(groups) do
  if group[2] == ARGV[2] and ARGV[3] == '0' then return last end
end
for _, group in ipairs(groups) do redis.call('XGROUP', 'DESTROY', KEYS[2], group[2]) end
if tonumber(last:match('^%d+')) > tonumber(ARGV[1]) then -- a foreign id: ours would be refused
  redis.call('DEL', KEYS[2])
  last = '0-0'
elseif ARGV[3] == '1' then
  redis.call('XTRIM', KEYS[2], 'MAXLEN', 0)
else
  redis.call('XTRIM', KEYS[2], 'MINID', ARGV[1] .. '-0')
end
redis.call('XGROUP', 'CREATE', KEYS[2], ARGV[2], '0', 'MKSTREAM')
return last
