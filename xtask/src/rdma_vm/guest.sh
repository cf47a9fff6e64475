#!/bin/sh
# The guest's first program: loads soft-RoCE, makes four devices, runs /programs line by line, and ends the
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
for module in crc32_generic udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe veth llc stp bridge sch_netem; do
    insmod "/modules/$module.ko" || end 120
done
ulimit -l unlimited
# By path: the shell's own applets come first, and busybox's `ip` knows less.
ip=/usr/bin/ip
$ip link set lo up
# Two links that fail apart, each a veth pair with a device at either end: rxe0 to rxe1, rxe2 to rxe3. Both ends are in one
# namespace: without routes of their own the kernel would short-cut through lo.
$ip rule add pref 100 lookup local && $ip rule del pref 0 || end 121
join() { # near far subnet near-device far-device table
    $ip link add "$1" type veth peer name "$2" || end 122
    # Room for path MTU 4096 and its headers.
    $ip link set "$1" mtu 4200 up && $ip link set "$2" mtu 4200 up || end 122
    $ip addr add "$3.1/24" dev "$1" && $ip addr add "$3.2/24" dev "$2" || end 122
    $ip rule add pref "$6" iif lo to "$3.2" lookup "$6" && $ip route add "$3.2" dev "$1" src "$3.1" table "$6" || end 122
    $ip rule add pref "$(($6 + 1))" iif lo to "$3.1" lookup "$(($6 + 1))" &&
        $ip route add "$3.1" dev "$2" src "$3.2" table "$(($6 + 1))" || end 122
    for device in "$1" "$2" all; do
        echo 1 >"/proc/sys/net/ipv4/conf/$device/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/$device/rp_filter"
    done
    $ip neigh replace "$3.2" lladdr "$(cat "/sys/class/net/$2/address")" dev "$1" nud permanent
    $ip neigh replace "$3.1" lladdr "$(cat "/sys/class/net/$1/address")" dev "$2" nud permanent
    /usr/bin/rdma link add "$4" type rxe netdev "$1" && /usr/bin/rdma link add "$5" type rxe netdev "$2" || end 123
}
join ve0 ve1 10.77.0 rxe0 rxe1 20
join ve2 ve3 10.78.0 rxe2 rxe3 30
chmod 666 /dev/infiniband/uverbs*

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
