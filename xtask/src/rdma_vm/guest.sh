#!/bin/sh
# The guest's first program: loads soft-RoCE, joins two devices by a veth pair, runs /programs line by line, and ends the
# machine with the number of those that failed (at most 100), or 120 and up when the machine itself could not be set up.
export PATH=/usr/bin:/bin HOME=/tmp TMPDIR=/tmp
/bin/busybox mkdir -p /proc /sys /dev /tmp /run
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o size=50% tmpfs /tmp
mount -t tmpfs tmpfs /run

end() {
    echo "@ended $1"
    # QEMU's debug-exit port.
    printf "\\x$(printf %x "$1")" | dd of=/dev/port bs=1 seek=244 2>/dev/null
    poweroff -f
}

echo "@started"
for module in crc32_generic udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe veth; do
    insmod "/modules/$module.ko" || end 120
done
ulimit -l unlimited
# By path: the shell's own applets come first, and busybox's `ip` knows less.
ip=/usr/bin/ip
$ip link set lo up
$ip link add ve0 type veth peer name ve1 || end 121
# Room for path MTU 4096 and its headers.
$ip link set ve0 mtu 4200 up && $ip link set ve1 mtu 4200 up || end 121
$ip addr add 10.77.0.1/24 dev ve0 && $ip addr add 10.77.0.2/24 dev ve1 || end 121
# Both ends are in one namespace: without these routes the kernel would short-cut through lo.
$ip rule add pref 100 lookup local && $ip rule del pref 0 || end 122
$ip rule add pref 10 iif lo to 10.77.0.2 lookup 20 && $ip route add 10.77.0.2 dev ve0 src 10.77.0.1 table 20 || end 122
$ip rule add pref 11 iif lo to 10.77.0.1 lookup 21 && $ip route add 10.77.0.1 dev ve1 src 10.77.0.2 table 21 || end 122
for device in ve0 ve1 all; do
    echo 1 >"/proc/sys/net/ipv4/conf/$device/accept_local"
    echo 0 >"/proc/sys/net/ipv4/conf/$device/rp_filter"
done
$ip neigh replace 10.77.0.2 lladdr "$(cat /sys/class/net/ve1/address)" dev ve0 nud permanent
$ip neigh replace 10.77.0.1 lladdr "$(cat /sys/class/net/ve0/address)" dev ve1 nud permanent
/usr/bin/rdma link add rxe0 type rxe netdev ve0 && /usr/bin/rdma link add rxe1 type rxe netdev ve1 || end 123

failed=0
cd /tmp
while read -r name limit command <&3; do
    echo "@begin $name"
    began=$(cut -d' ' -f1 /proc/uptime)
    timeout "$limit" sh -c "$command" </dev/null 3<&-
    status=$?
    echo "@end $name $status $began $(cut -d' ' -f1 /proc/uptime)"
    [ "$status" = 0 ] || failed=$((failed + 1))
    [ "$failed" -lt 100 ] || break
done 3</programs
end "$failed"
