-- Writes requests, each in the place of an earlier one if it names one. Without a payload it only
-- withdraws the earlier one. The caller gives the ids, so that sending it twice writes it once.
-- Returns for each: 1 done, 0 the earlier request is gone, 2 its claim was renewed.
-- KEYS: epoch, rollouts
-- ARGV: epoch, group, then for each: earlier id or '', milliseconds that its claim must be idle,
--   id or '', payload
--include fence
local function renewed(earlier, idle)
  if idle == '0' then return false end
  local claim = redis.pcall('XPENDING', KEYS[2], ARGV[2], earlier, earlier, 1)
  return not claim.err and claim[1] and claim[1][3] < tonumber(idle)
end
local function replace(earlier, idle, id, payload)
  if earlier ~= '' then
    if renewed(earlier, idle) then return 2 end
    if redis.call('XDEL', KEYS[2], earlier) == 0 then
      local written = id ~= '' and #redis.call('XRANGE', KEYS[2], id, id) == 1
      return written and 1 or 0
    end
    redis.call('XACK', KEYS[2], ARGV[2], earlier)
  end
  if id == '' then return 1 end
  local added = redis.pcall('XADD', KEYS[2], id, 'e', payload)
  if type(added) == 'table' and added.err and not added.err:find('equal or smaller', 1, true) then
    return added
  end
  return 1
end
local done = {}
for i = 3, #ARGV, 4 do
  local reply = replace(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
  if type(reply) == 'table' then return reply end
  done[#done + 1] = reply
end
return done
