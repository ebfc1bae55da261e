-- Deletes samples that no resume needs any more. KEYS: epoch, experiences   ARGV: epoch, ids
--include fence
for i = 2, #ARGV do redis.call('XDEL', KEYS[2], ARGV[i]) end
return 1
