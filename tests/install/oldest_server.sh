#!/usr/bin/env bash
# Puts the oldest promised server, redis-server 7.0, into .oldest-server, where the tests look.
# Debian 12 and Ubuntu 24.04 have it in their archives; nothing is installed and PATH stays as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder="$PWD/.oldest-server"
packages=(redis-tools libjemalloc2 liblzf1 libatomic1)
rm -rf "$folder"
mkdir -p "$folder/packages"
(cd "$folder/packages" && { apt-get download -q "${packages[@]}" ||
    { apt-get update -q && apt-get download -q "${packages[@]}"; }; })
for package in "$folder"/packages/*.deb; do
    dpkg-deb -x "$package" "$folder"
done
# The name that it is called by decides which of its tools it is.
cp -L "$folder/usr/bin/redis-check-rdb" "$folder/usr/bin/redis-server"
libraries="$(find "$folder" -name '*.so.*' -printf '%h\n' | sort -u | paste -sd:)"
cat >"$folder/redis-server" <<END
#!/bin/sh
LD_LIBRARY_PATH="$libraries" exec "$folder/usr/bin/redis-server" "\$@"
END
chmod +x "$folder/redis-server"
"$folder/redis-server" --version | grep "Redis server v=7\.0\."
