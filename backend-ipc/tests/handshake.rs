//! Peers that break the protocol, on either side: typed refusals, bounded waits, nobody else delayed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::type_complexity, missing_docs)]

mod common;
use common::*;

use flashboot_backend_ipc::IpcConfig;
use flashboot_core::{Arena as _, Generation, Kind, Locator, TransportName};
use flashboot_memory::HostArena;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

const PAYLOAD: u64 = 2 * BLOCK;
const MALFORMED: u32 = 3;
const VERSION: u32 = 4;
const FULL: u32 = 5;

#[tokio::test(flavor = "current_thread")]
async fn readers_that_talk_nonsense_are_refused_and_delay_nobody() {
    let dir = tempfile::tempdir().unwrap();
    // Whoever is silent may be so for longer than anybody waits here.
    let patient = IpcConfig { handshake: 10 * PATIENCE, ..config(dir.path()) };
    let exchange = open(&patient).await.unwrap();
    let source = seed(PAYLOAD, 7);
    let export = exchange.export(source, PATIENCE).await.unwrap();
    let path = export.locator().endpoint.clone();
    // They stay connected and silent throughout.
    let silent: Vec<_> = (0..20).map(|_| dial(&path)).collect();
    let ask = |frame: &[u8]| {
        let socket = dial(&path);
        send(&socket, frame, &[]);
        let reply = receive(&socket);
        assert!(receive(&socket).is_empty(), "refused and hung up");
        status(&reply)
    };
    let good = request(7);
    assert_eq!(ask(b"GET / HTTP/1.1\r\n\r\n"), Some(MALFORMED));
    assert_eq!(ask(&good[..31]), Some(MALFORMED), "short");
    assert_eq!(ask(&[&good[..], &[0]].concat()), Some(MALFORMED), "long");
    assert_eq!(ask(&[&good[..], &[0; 100_000]].concat()), Some(MALFORMED), "oversized");
    let mut other = good.clone();
    other[8] = 2;
    assert_eq!(ask(&other), Some(VERSION));
    let mut token = good.clone();
    token[24] = 1;
    assert_eq!(ask(&token), Some(1), "a token where none is taken");
    // One that sends descriptors gains and costs nothing.
    let socket = dial(&path);
    let extra = memfd_create("extra", MemfdFlags::CLOEXEC).unwrap();
    send(&socket, &good, &[extra.as_fd(), extra.as_fd()]);
    assert_eq!(status(&receive(&socket)), Some(0));
    // One that goes on talking is hung up on.
    send(&socket, b"more", &[]);
    assert!(receive(&socket).is_empty());
    // One that goes at once is no trouble.
    for _ in 0..50 {
        let socket = dial(&path);
        send(&socket, &good, &[]);
    }
    let mover = exchange.import(export.locator(), arena(PAYLOAD), PATIENCE).await.unwrap();
    assert_eq!(pull(&*mover, PAYLOAD).await.unwrap(), expected(PAYLOAD));
    drop(silent);
}

#[tokio::test(flavor = "current_thread")]
async fn silent_readers_lose_their_place_at_the_deadline_and_a_crowd_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        IpcConfig { handshake: Duration::from_secs(1), max_pending: 8, max_readers: 4, ..config(dir.path()) };
    let exchange = open(&config).await.unwrap();
    let export = exchange.export(seed(PAYLOAD, 7), PATIENCE).await.unwrap();
    let path = export.locator().endpoint.clone();
    let silent: Vec<_> = (0..8).map(|_| dial(&path)).collect();
    let ninth = dial(&path);
    assert_eq!(status(&receive(&ninth)), Some(FULL));
    let e = exchange.import(export.locator(), arena(PAYLOAD), PATIENCE).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Busy, "{e}");
    let started = Instant::now();
    for socket in &silent {
        assert!(receive(socket).is_empty(), "hung up on");
    }
    assert!(started.elapsed() < PATIENCE, "all of them together, not one after the other");
    let mut movers = Vec::new();
    for _ in 0..4 {
        movers.push(exchange.import(export.locator(), arena(PAYLOAD), PATIENCE).await.unwrap());
    }
    let e = exchange.import(export.locator(), arena(PAYLOAD), PATIENCE).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Busy, "{e}");
    drop(movers.pop());
    let freed = Instant::now();
    // The exporter hears a moment later that a reader is gone.
    while let Err(e) = exchange.import(export.locator(), arena(PAYLOAD), PATIENCE).await {
        assert!(e.kind() == Kind::Busy && freed.elapsed() < PATIENCE, "a place came free: {e}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A locator of an exporter that `answer` plays once, on its own thread.
fn impostor(
    dir: &Path,
    arena: &HostArena,
    answer: impl FnOnce(OwnedFd, Locator) + Send + 'static,
) -> (Locator, std::thread::JoinHandle<()>) {
    let path = dir.join(format!("{:x}.sock", rand()));
    let listener = listen(&path);
    let locator = Locator {
        transport: TransportName::Ipc,
        generation: Generation::from_random(7),
        payload: arena.payload(),
        capacity: arena.capacity(),
        shards: 1,
        location: arena.location(),
        endpoint: path.to_str().unwrap().into(),
    };
    let said = locator.clone();
    let thread = std::thread::spawn(move || {
        let socket = rustix::net::accept(&listener).unwrap();
        answer(socket, said);
    });
    (locator, thread)
}

fn rand() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[tokio::test(flavor = "current_thread")]
async fn an_exporter_that_breaks_the_protocol_is_refused_by_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let source = seed(PAYLOAD, 7);
    let ask = async |timeout: Duration, answer: Box<dyn FnOnce(OwnedFd, Locator) + Send>| {
        let (locator, thread) = impostor(dir.path(), &source, answer);
        let started = Instant::now();
        let result = exchange.import(&locator, arena(PAYLOAD), timeout).await.map(drop);
        let took = started.elapsed();
        thread.join().unwrap();
        (result, took)
    };
    let reply = async |frame: Box<dyn Fn(&Locator) -> Vec<u8> + Send>, descriptors: Vec<OwnedFd>| {
        let answer = move |socket: OwnedFd, locator: Locator| {
            receive(&socket);
            let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            send(&socket, &frame(&locator), &descriptors);
            // Stays until the reader has gone.
            receive(&socket);
        };
        ask(PATIENCE, Box::new(answer)).await.0
    };
    let kind = |result: flashboot_core::Result<()>| result.map_err(|e| e.kind());
    let own = || source.as_fd().try_clone_to_owned().unwrap();
    let memfd = |size: u64, seals: SealFlags| {
        let fd = memfd_create("impostor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, size).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    let size = source.capacity();

    assert_eq!(kind(reply(Box::new(grant), vec![own()]).await), Ok(()), "the impostor can also be good");
    assert_eq!(kind(reply(Box::new(grant), vec![]).await), Err(Kind::Protocol), "no descriptor");
    assert_eq!(kind(reply(Box::new(grant), vec![own(), own()]).await), Err(Kind::Protocol), "two");
    let six = (0..6).map(|_| own()).collect();
    assert_eq!(kind(reply(Box::new(grant), six).await), Err(Kind::Protocol), "six");
    for seal in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
        let e = reply(Box::new(grant), vec![memfd(size, all - seal)]).await.unwrap_err();
        assert_eq!(e.kind(), Kind::Permission, "{e}");
        assert!(e.peer().is_some() && e.detail().contains("F_SEAL_"), "{e}");
    }
    assert_eq!(kind(reply(Box::new(grant), vec![memfd(size - 4096, all)]).await), Err(Kind::Mismatch));
    assert_eq!(kind(reply(Box::new(grant), vec![memfd(size, all)]).await), Err(Kind::Corrupt));
    let file = tempfile::tempfile().unwrap();
    file.set_len(size).unwrap();
    assert_eq!(kind(reply(Box::new(grant), vec![file.into()]).await), Err(Kind::Permission), "a file");
    let (pipe, _other) = std::io::pipe().unwrap();
    assert_eq!(kind(reply(Box::new(grant), vec![pipe.into()]).await), Err(Kind::Permission), "a pipe");

    let changed = |at: usize, byte: u8| -> Box<dyn Fn(&Locator) -> Vec<u8> + Send> {
        Box::new(move |l| {
            let mut frame = grant(l);
            frame[at] = byte;
            frame
        })
    };
    assert_eq!(kind(reply(changed(0, 0), vec![own()]).await), Err(Kind::Protocol), "magic");
    assert_eq!(kind(reply(changed(8, 9), vec![own()]).await), Err(Kind::Mismatch), "version");
    assert_eq!(kind(reply(changed(12, 77), vec![own()]).await), Err(Kind::Protocol), "status");
    assert_eq!(kind(reply(changed(12, 1), vec![]).await), Err(Kind::Permission), "a refusal");
    assert_eq!(kind(reply(changed(16, 1), vec![own()]).await), Err(Kind::Mismatch), "payload");
    assert_eq!(kind(reply(changed(24, 1), vec![own()]).await), Err(Kind::Mismatch), "capacity");
    assert_eq!(kind(reply(changed(36, 1), vec![own()]).await), Err(Kind::Protocol), "text");
    assert_eq!(kind(reply(changed(40, 8), vec![own()]).await), Err(Kind::StaleGeneration), "generation");
    let cut = Box::new(|l: &Locator| grant(l)[..47].to_vec());
    assert_eq!(kind(reply(cut, vec![own()]).await), Err(Kind::Protocol), "cut");
    let long = Box::new(|l: &Locator| [grant(l), vec![0; 4096]].concat());
    assert_eq!(kind(reply(long, vec![own()]).await), Err(Kind::Protocol), "oversized");

    let closes = Box::new(|socket, _| drop(socket));
    assert_eq!(kind(ask(PATIENCE, closes).await.0), Err(Kind::SourceLost), "hangs up");
    let silent = Box::new(|socket, _| {
        receive(&socket);
        receive(&socket);
    });
    let (result, took) = ask(Duration::from_millis(200), silent).await;
    assert_eq!(kind(result), Err(Kind::Deadline), "silent");
    assert!(took >= Duration::from_millis(200) && took < PATIENCE, "{took:?}");
}

#[tokio::test(flavor = "current_thread")]
async fn an_exporter_that_never_accepts_costs_no_more_than_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let source = seed(PAYLOAD, 7);
    let path = dir.path().join("full.sock");
    let socket = socket();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let export = exchange.export(source, PATIENCE).await.unwrap();
    let locator = Arc::new(Locator { endpoint: path.to_str().unwrap().into(), ..export.locator().clone() });
    let _first = dial(&locator.endpoint);
    for _ in 0..3 {
        let started = Instant::now();
        let e = exchange.import(&locator, arena(PAYLOAD), Duration::from_millis(150)).await.unwrap_err();
        assert_eq!(e.kind(), Kind::Deadline, "{e}");
        assert!(started.elapsed() < PATIENCE);
    }
}
