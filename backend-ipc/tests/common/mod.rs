//! What the tests share: arenas with bytes in them, endpoints in a fresh directory, raw ends of the protocol.
#![allow(dead_code, unreachable_pub, missing_docs)]

use flashboot_backend_ipc::{IpcConfig, IpcTransport, PROTOCOL_MAGIC, PROTOCOL_VERSION};
use flashboot_core::{
    Arena, ArenaSpec, BlockDigest, ByteRange, Digests, Generation, Geometry, HandleExchange, Locator, Mover,
    Pull, Result, ShardId, Transport as _,
};
use flashboot_memory::{HostArena, HostArenaConfig, PageKind};
use rustix::fs::ftruncate;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg,
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

pub const BLOCK: u64 = 4096;
pub const PATIENCE: Duration = Duration::from_secs(10);

pub fn arena(payload: u64) -> Arc<HostArena> {
    let config = HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() };
    HostArena::create(ArenaSpec { payload, shards: 1 }, &config).unwrap().0
}

pub fn data(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect()
}

/// An arena with `data(payload)`, all of it published under `generation`.
pub fn seed(payload: u64, generation: u64) -> Arc<HostArena> {
    let arena = arena(payload);
    arena.copy_in(0, &data(payload)).unwrap();
    arena.begin(Generation::from_random(generation));
    arena.publish(ShardId(0), payload).unwrap();
    arena
}

pub fn bytes(arena: &HostArena) -> Vec<u8> {
    let mut all = vec![0; arena.payload() as usize];
    arena.copy_out(0, &mut all).unwrap();
    all
}

pub fn config(directory: &Path) -> IpcConfig {
    IpcConfig { directory: directory.join("sockets"), ..IpcConfig::default() }
}

pub async fn open(config: &IpcConfig) -> Result<Arc<dyn HandleExchange>> {
    IpcTransport::default().open(config.clone()).await
}

pub async fn pull(mover: &dyn Mover, payload: u64) -> Result<Vec<BlockDigest>> {
    let pull = Pull { range: ByteRange::new(0, payload), hash: Some(BLOCK) };
    Ok(mover.start(pull)?.quiesced().await?.digests)
}

pub fn expected(payload: u64) -> Vec<BlockDigest> {
    let geometry = Geometry::new(payload, BLOCK, BLOCK, 1).unwrap();
    Digests::of(&geometry, &data(payload)).values().to_vec()
}

pub fn request(generation: u64) -> Vec<u8> {
    [
        &PROTOCOL_MAGIC.to_le_bytes()[..],
        &PROTOCOL_VERSION.to_le_bytes(),
        &[0; 4],
        &generation.to_le_bytes(),
        &[0; 8],
    ]
    .concat()
}

/// A reply that grants `locator`.
pub fn grant(locator: &Locator) -> Vec<u8> {
    [
        &PROTOCOL_MAGIC.to_le_bytes()[..],
        &PROTOCOL_VERSION.to_le_bytes(),
        &[0; 4],
        &locator.payload.to_le_bytes(),
        &locator.capacity.to_le_bytes(),
        &locator.shards.to_le_bytes(),
        &[0; 4],
        &locator.generation.word().to_le_bytes(),
    ]
    .concat()
}

pub fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

pub fn dial(path: &str) -> OwnedFd {
    let socket = socket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

pub fn listen(path: &Path) -> OwnedFd {
    let socket = socket();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

/// Sends one packet with the descriptors.
pub fn send(socket: &OwnedFd, frame: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// One packet; empty when the peer hung up.
pub fn receive(socket: &OwnedFd) -> Vec<u8> {
    let mut frame = [0; 4096];
    match rustix::net::recv(socket, &mut frame, RecvFlags::empty()) {
        Ok((len, _)) => frame[..len].to_vec(),
        Err(_) => Vec::new(),
    }
}

/// The status of a reply.
pub fn status(reply: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(reply.get(12..16)?.try_into().unwrap()))
}

/// Takes the descriptor of `locator` by the raw protocol and tries everything that would change the memory;
/// returns what got through.
pub fn write_through(locator: &Locator) -> Vec<&'static str> {
    let socket = dial(&locator.endpoint);
    send(&socket, &request(locator.generation.word()), &[]);
    let (mut frame, mut space) = ([0; 4096], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&socket, &mut [IoSliceMut::new(&mut frame)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None })
        .flatten()
        .collect();
    assert_eq!(fds.len(), 1);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fds[0]));
    let reopened = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut through = Vec::new();
    for fd in [fds.into_iter().next().unwrap(), reopened.into()] {
        if rustix::io::pwrite(&fd, b"x", 0).is_ok() {
            through.push("pwrite");
        }
        if ftruncate(&fd, 0).is_ok() {
            through.push("truncate");
        }
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint replaces no mapping; it is expected to fail.
        if unsafe { mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, &fd, 0) }.is_ok() {
            through.push("mmap");
        }
    }
    through
}
