-- Writes requests, each in the place of an earlier one if it names one. Without a payload it only
-- withdraws the earlier one. The caller gives the ids, so that sending it twice writes it once.
-- Returns for each: 1 done, 0 the earlier request is gone, 2 its claim was renewed.
-- KEYS: epoch, rollouts
-- ARGV: epoch, group, then for each: earlier id or '', milliseconds that its claim must be idle,
--   id or '', payload
--include fence
local done = {}
for i = 3, #ARGV, 4 do
  local earlier, idle, id, payload = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local reply = 1
  if earlier ~= '' then
    if idle ~= '0' then
      local claim = redis.pcall('XPENDING', KEYS[2], ARGV[2], earlier, earlier, 1)
      if not claim.err and claim[1] and claim[1][3] < tonumber(idle) then reply = 2 end
    end
    if reply == 1 and redis.call('XDEL', KEYS[2], earlier) == 0 then
      local written = id ~= '' and #redis.call('XRANGE', KEYS[2], id, id) == 1
      reply = written and 1 or 0
    elseif reply == 1 then
      redis.call('XACK', KEYS[2], ARGV[2], earlier)
    end
  end
  if reply == 1 and id ~= '' then
    local added = redis.pcall('XADD', KEYS[2], id, 'e', payload)
    if type(added) == 'table' and added.err and not added.err:find('equal or smaller', 1, true) then
      return added
    end
  end
  done[#done + 1] = reply
end
return done
