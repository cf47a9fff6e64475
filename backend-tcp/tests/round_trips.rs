//! How many round trips lie between a plan and the first byte: counted by a relay, not timed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod common;

use common::{MIB, SECOND, Source, arena, import, seed};
use flashboot_backend_tcp::TcpConfig;
use flashboot_core::{Arena as _, ByteRange, Locator, Pull, ShardId};
use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// What the relay saw of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    /// The dial, and every time the reader said something after it had been answered.
    trips: u32,
    reader_spoke: bool,
}

/// Carries connections to a source, and nothing of any before all are there that are to come.
struct Relay {
    address: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Relay {
    fn to(source: &str, connections: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (seen, source) = (Arc::new(Mutex::new(Vec::new())), source.to_owned());
        let gate = Arc::new((Mutex::new(0), Condvar::new()));
        let all = Arc::clone(&seen);
        thread::spawn(move || {
            for (number, reader) in listener.incoming().enumerate() {
                let (reader, source) = (reader.unwrap(), TcpStream::connect(&source).unwrap());
                all.lock().unwrap().push(Seen { trips: 1, reader_spoke: false });
                *gate.0.lock().unwrap() += 1;
                gate.1.notify_all();
                for (from, to, by_reader) in [
                    (reader.try_clone().unwrap(), source.try_clone().unwrap(), true),
                    (source, reader, false),
                ] {
                    let (all, gate) = (Arc::clone(&all), Arc::clone(&gate));
                    thread::spawn(move || {
                        drop(gate.1.wait_while(gate.0.lock().unwrap(), |come| *come < connections).unwrap());
                        carry(from, to, || {
                            let seen = &mut all.lock().unwrap()[number];
                            seen.trips += u32::from(by_reader && !seen.reader_spoke);
                            seen.reader_spoke = by_reader;
                        });
                    });
                }
            }
        });
        Self { address, seen }
    }

    fn trips(&self) -> Vec<u32> {
        let mut trips: Vec<_> = self.seen.lock().unwrap().iter().map(|seen| seen.trips).collect();
        trips.sort_unstable();
        trips
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, mut carried: impl FnMut()) {
    let mut buffer = [0; 65_536];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        carried();
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[tokio::test]
async fn the_first_byte_is_five_round_trips_after_the_plan() {
    let from = seed(2 * MIB);
    let source = Source::of(&from, TcpConfig::default()).await;
    let connections = TcpConfig::default().connections + 1;
    // Where one connection waited for another, none would ever begin.
    let relay = Relay::to(&source.locator().endpoint, connections);
    let locator = Locator { endpoint: relay.address.clone(), ..source.locator().clone() };
    let into = arena(2 * MIB);
    let mover = import(&locator, &into, TcpConfig::default()).await.unwrap();
    let seen = mover.observe(ShardId(0), 2 * MIB, SECOND).await.unwrap();
    assert_eq!((seen.generation, seen.progress), (Some(locator.generation), 2 * MIB));
    // Dialled, hello, proof, attached: the first look came with that.
    assert_eq!(relay.trips(), vec![4; connections]);
    let pull = Pull { range: ByteRange { start: 0, end: 4096 }, hash: None };
    mover.start(pull).unwrap().quiesced().await.unwrap();
    let trips = relay.trips();
    assert_eq!((trips.len(), trips[connections - 1]), (connections, 5), "{trips:?}");
    let mut first = [0; 4096];
    into.copy_out(0, &mut first).unwrap();
    assert!((0..).zip(first).all(|(at, found)| found == common::byte(at)));
    // A later look is a new question.
    assert_eq!(mover.observe(ShardId(0), 1, SECOND).await.unwrap().progress, 2 * MIB);
    assert_eq!(relay.trips()[connections - 1], 5);
}

#[tokio::test]
async fn a_refusal_is_heard_though_a_look_was_sent_along() {
    let from = seed(MIB);
    let source = Source::of(&from, TcpConfig::default()).await;
    let locator = source.locator().clone();
    drop(source.export);
    let error = import(&locator, &arena(MIB), TcpConfig::default()).await.unwrap_err();
    assert!(error.detail().contains("is not exported here"), "{error}");
}
