-- Deletes samples that no resume needs any more. The ids are one argument, for a client takes its time
-- over each.
-- KEYS: epoch, experiences   ARGV: epoch, ids with spaces between them
--include fence
for id in ARGV[2]:gmatch('%S+') do redis.call('XDEL', KEYS[2], id) end
return 1
