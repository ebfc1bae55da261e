-- Included by scripts; it is no script by itself. Refuses a stream of answers with an id past year 9999,
-- which a writer chose, before the first write: it may take no further entry. The trainer mends it.
-- KEYS[3]: experiences
redis.call('XLEN', KEYS[3]) -- fails before the first write if the key is no stream
if redis.call('EXISTS', KEYS[3]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[3])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      local milliseconds = info[i + 1]:match('^%d+')
      if #milliseconds > 15 or (#milliseconds == 15 and milliseconds > '253402300799999') then
        return {err = 'ERR the stream of answers has exhausted the last possible ID'}
      end
    end
  end
end
