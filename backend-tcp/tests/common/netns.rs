//! Hosts that are network namespaces on one wire, made and removed by the test itself. Needs root and iproute2.
//!
//! The wire delays and loses: by `tc netem` on veth pairs and a bridge where the kernel has it, else by a thread that
//! passes the frames of TAP devices on. A cut host's frames are dropped, both ways, without a word to either end.

use std::{
    collections::VecDeque,
    fs::File,
    io::{Read as _, Write as _},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

const PREFIX: &str = "fbt";

/// Why there can be no namespaces here, if so.
pub(crate) fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root, to make network namespaces".into());
    }
    let found = |tool: &str| {
        let mut command = Command::new(tool);
        command.arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
    };
    if !found("ip") || !found("tc") {
        return Some("needs iproute2 (ip and tc)".into());
    }
    let name = format!("{PREFIX}{}probe", std::process::id());
    let made = quietly(&["netns", "add", &name]);
    quietly(&["netns", "del", &name]);
    (!made).then(|| "needs a kernel and a container that let root make network namespaces".into())
}

/// Why no wire can be made narrow here, if so.
pub(crate) fn too_wide() -> Option<String> {
    if let Some(why) = missing() {
        return Some(why);
    }
    let name = format!("{PREFIX}{}narrow", std::process::id());
    quietly(&["netns", "add", &name]);
    let args = [&["-n", &name, "qdisc", "add", "dev", "lo", "root"], &narrow("1000000")[..]].concat();
    let made = quiet("tc", &args);
    quietly(&["netns", "del", &name]);
    (!made).then(|| "needs a kernel with tc's token bucket filter (sch_tbf)".into())
}

/// A token bucket of so many bits a second: at most a few milliseconds of them at once.
fn narrow(bits: &str) -> [&str; 7] {
    ["tbf", "rate", bits, "burst", "128kb", "latency", "200ms"]
}

fn quietly(args: &[&str]) -> bool {
    quiet("ip", args)
}

fn quiet(tool: &str, args: &[&str]) -> bool {
    let mut command = Command::new(tool);
    command.args(args).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

#[track_caller]
fn run(tool: &str, args: &[&str]) {
    let output = Command::new(tool).args(args).output().unwrap();
    assert!(output.status.success(), "{tool} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// What the wire does to frames.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weather {
    pub(crate) delay: Duration,
    /// Of a hundred thousand frames, so many are lost.
    pub(crate) loss: u32,
}

pub(crate) const FAIR: Weather = Weather { delay: Duration::ZERO, loss: 0 };

/// Some hosts on one wire.
pub(crate) struct Network {
    names: Vec<String>,
    hub: Option<String>,
    relay: Option<Relay>,
}

impl Network {
    /// `hosts` of them, under names that nobody else has: `tag` is to differ between the networks of one process.
    pub(crate) fn new(tag: &str, hosts: usize, weather: Weather) -> Self {
        sweep();
        let name = |host: &str| format!("{PREFIX}{}{tag}{host}", std::process::id());
        let names: Vec<String> = (0..hosts).map(|host| name(&host.to_string())).collect();
        let mut network = Self { names, hub: None, relay: None };
        for name in &network.names {
            run("ip", &["netns", "add", name]);
            run("ip", &["-n", name, "link", "set", "lo", "up"]);
        }
        let hub = name("hub");
        run("ip", &["netns", "add", &hub]);
        network.hub = Some(hub.clone());
        if weather.loss == 0 && weather.delay.is_zero() || kernel_has_netem(&hub) {
            network.veths(&hub, weather);
        } else {
            let taps = network.names.iter().map(|name| tap(name));
            network.relay = Some(Relay::start(taps.collect(), weather));
        }
        for host in 0..hosts {
            let (name, [v4, v6]) = (&network.names[host], [4, 6].map(|of| address(host, of)));
            run("ip", &["-n", name, "addr", "add", &format!("{v4}/24"), "dev", "net0"]);
            run("ip", &["-n", name, "addr", "add", &format!("{v6}/64"), "dev", "net0", "nodad"]);
            run("ip", &["-n", name, "link", "set", "net0", "up"]);
        }
        network
    }

    fn veths(&self, hub: &str, weather: Weather) {
        run("ip", &["-n", hub, "link", "add", "br0", "type", "bridge"]);
        run("ip", &["-n", hub, "link", "set", "br0", "up"]);
        for (host, name) in self.names.iter().enumerate() {
            let port = format!("port{host}");
            run(
                "ip",
                &["-n", hub, "link", "add", &port, "type", "veth", "peer", "name", "net0", "netns", name],
            );
            run("ip", &["-n", hub, "link", "set", &port, "master", "br0", "up"]);
            if weather.loss > 0 || !weather.delay.is_zero() {
                let (delay, loss) = (format!("{}us", weather.delay.as_micros()), percent(weather.loss));
                let args = [
                    "-n", name, "qdisc", "add", "dev", "net0", "root", "netem", "delay", &delay, "loss",
                    &loss,
                ];
                run("tc", &args);
            }
        }
    }

    /// Every host sends at most so many bytes a second, the frames' headers among them. Not for a network with weather.
    pub(crate) fn shape(&self, bytes_per_s: u64) {
        let bits = (bytes_per_s * 8).to_string();
        for name in &self.names {
            run("tc", &[&["-n", name, "qdisc", "add", "dev", "net0", "root"], &narrow(&bits)[..]].concat());
        }
    }

    /// By what frames are delayed and lost.
    pub(crate) fn by(&self) -> &'static str {
        if self.relay.is_some() { "a relay of frames between TAP devices" } else { "tc netem on veth pairs" }
    }

    /// `program` on a host.
    pub(crate) fn command(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program);
        command
    }

    /// Nothing reaches the host any more, and nothing leaves it.
    pub(crate) fn cut(&self, host: usize) {
        match (&self.relay, &self.hub) {
            (Some(relay), _) => relay.cut(host),
            // The far end: the host itself sees no link go down, its frames go nowhere.
            (None, Some(hub)) => run("ip", &["-n", hub, "link", "set", &format!("port{host}"), "nomaster"]),
            (None, None) => {}
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The taps go with their last descriptor.
        drop(self.relay.take());
        for name in self.names.iter().chain(&self.hub) {
            quietly(&["netns", "del", name]);
        }
    }
}

/// Removes what runs that were killed have left.
fn sweep() {
    let Ok(names) = std::fs::read_dir("/run/netns") else { return };
    for name in names.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let pid: String = match name.strip_prefix(PREFIX) {
            Some(rest) => rest.chars().take_while(char::is_ascii_digit).collect(),
            None => continue,
        };
        if !pid.is_empty() && !Path::new("/proc").join(pid).exists() {
            quietly(&["netns", "del", &name]);
        }
    }
}

/// Address of a host on the wire, of IP version 4 or 6.
pub(crate) fn address(host: usize, version: u8) -> String {
    if version == 6 { format!("fd77::{}", host + 1) } else { format!("10.77.0.{}", host + 1) }
}

/// The namespace `host` of the network `tag` that process `pid` has made.
pub(crate) fn enter(pid: u32, tag: &str, host: usize) {
    enter_named(&format!("{PREFIX}{pid}{tag}{host}"));
}

/// Moves this thread, and those that it starts later.
fn enter_named(name: &str) {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    let file = File::open(Path::new("/run/netns").join(name)).unwrap();
    move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network)).unwrap();
}

fn kernel_has_netem(hub: &str) -> bool {
    let mut command = Command::new("tc");
    command.args(["-n", hub, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

fn percent(loss: u32) -> String {
    format!("{}.{:03}%", loss / 1000, loss % 1000)
}

/// A TAP device called `net0` in a namespace; its frames are read from and written to the descriptor.
fn tap(namespace: &str) -> File {
    let namespace = namespace.to_owned();
    // A device is made where the thread is that asks for it.
    let made = std::thread::spawn(move || {
        enter_named(&namespace);
        let file = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        const NO_INFO_TAP: u16 = 0x1000 | 0x0002;
        let mut request = [0; 40];
        request[..4].copy_from_slice(b"net0");
        request[16..18].copy_from_slice(&NO_INFO_TAP.to_ne_bytes());
        const TUNSETIFF: rustix::ioctl::Opcode = 0x4004_54ca;
        // SAFETY: TUNSETIFF reads (and writes back) one `ifreq`, which has 40 bytes on every 64-bit Linux.
        let set = unsafe { rustix::ioctl::Updater::<TUNSETIFF, [u8; 40]>::new(&mut request) };
        // SAFETY: the operation and its argument are those of the line above.
        unsafe { rustix::ioctl::ioctl(&file, set) }.unwrap();
        rustix::io::ioctl_fionbio(&file, true).unwrap();
        file
    });
    made.join().unwrap()
}

/// The thread that is the wire.
struct Relay {
    ports: Arc<Mutex<Vec<bool>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A frame on its way.
struct Frame {
    due: Instant,
    from: usize,
    bytes: Vec<u8>,
}

impl Relay {
    fn start(taps: Vec<File>, weather: Weather) -> Self {
        let ports = Arc::new(Mutex::new(vec![true; taps.len()]));
        let stop = Arc::new(AtomicBool::new(false));
        let (on, end) = (Arc::clone(&ports), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut wire = VecDeque::new();
            let mut dice = 88_172_645_463_325_252_u64;
            while !end.load(Ordering::Relaxed) {
                carry(&taps, &on, weather, &mut wire, &mut dice);
            }
        });
        Self { ports, stop, thread: Some(thread) }
    }

    fn cut(&self, port: usize) {
        self.ports.lock().unwrap()[port] = false;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Takes every frame that is there, and delivers those that are due to every other port.
fn carry(taps: &[File], on: &Mutex<Vec<bool>>, weather: Weather, wire: &mut VecDeque<Frame>, dice: &mut u64) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut waiting: Vec<_> = taps.iter().map(|tap| PollFd::new(tap, PollFlags::IN)).collect();
    let left = wire.front().map_or(Duration::from_millis(5), |frame: &Frame| {
        frame.due.saturating_duration_since(Instant::now())
    });
    let left = Timespec::try_from(left.min(Duration::from_millis(5))).unwrap();
    let _ = poll(&mut waiting, Some(&left));
    let mut buffer = [0; 65_536];
    let on = on.lock().unwrap().clone();
    for (from, mut tap) in taps.iter().enumerate() {
        for _ in 0..64 {
            let Ok(len) = tap.read(&mut buffer) else { break };
            // Marsaglia's xorshift: the same losses in every run, as far as the frames are the same.
            *dice ^= *dice << 13;
            *dice ^= *dice >> 7;
            *dice ^= *dice << 17;
            let lost = (*dice >> 16) % 100_000 < u64::from(weather.loss);
            if on[from] && !lost {
                wire.push_back(Frame {
                    due: Instant::now() + weather.delay,
                    from,
                    bytes: buffer[..len].to_vec(),
                });
            }
        }
    }
    let now = Instant::now();
    while wire.front().is_some_and(|frame| frame.due <= now) {
        let Some(Frame { from, bytes, .. }) = wire.pop_front() else { return };
        for (to, mut tap) in taps.iter().enumerate().filter(|(to, _)| *to != from) {
            if on[to] {
                // A full queue loses frames, as wires do.
                let _ = tap.write(&bytes);
            }
        }
    }
}
