//! The pieces of streams that are being filled.
//!
//! A piece is complete once its stream is filled past its end. Where a stream cannot be filled in order (a map of
//! experts may ask for that) open pieces would pile up: those furthest on are then written as they are and read back
//! when more of them comes.

use super::step::Copy;
use crate::direct::Slab;
use crate::error::Result;
use crate::parallel::Refused;
use std::collections::BTreeMap;
use std::path::Path;

/// Where pieces go.
pub(crate) trait Sink: Sync {
    /// A complete piece: hash it, write it.
    fn put(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()>;

    /// An incomplete piece, to be kept for [`Sink::reload`].
    fn spill(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()>;

    /// A piece as it was spilled.
    fn reload(&self, stream: usize, start: u64, into: &mut [u8]) -> Result<()>;
}

/// A piece of a stream, and how many of its bytes the stream has.
pub(super) struct Piece {
    pub(super) stream: usize,
    pub(super) start: u64,
    pub(super) len: usize,
    pub(super) slab: Slab,
}

/// One stream.
struct Stream {
    bytes: u64,
    /// Each with how many bytes were put into it.
    open: BTreeMap<u64, (Slab, u64)>,
    spilled: BTreeMap<u64, u64>,
    /// The first piece that is not complete.
    next: u64,
}

/// All streams.
pub(super) struct Open<'s> {
    sink: &'s dyn Sink,
    piece: u64,
    streams: Vec<Stream>,
    /// Slabs that nobody uses; what is in them is anybody's.
    free: Vec<Slab>,
    open: usize,
    most: usize,
}

impl<'s> Open<'s> {
    /// Streams of these many bytes, each complete up to a piece; `most` pieces are kept open.
    pub(super) fn new(sink: &'s dyn Sink, piece: u64, streams: &[(u64, u64)], most: usize) -> Self {
        let streams = streams
            .iter()
            .map(|&(bytes, next)| Stream { bytes, open: BTreeMap::new(), spilled: BTreeMap::new(), next })
            .collect();
        Self { sink, piece, streams, free: Vec::new(), open: 0, most }
    }

    /// Takes a slab back.
    pub(super) fn recycle(&mut self, slab: Slab) {
        self.free.push(slab);
    }

    /// Writes `copy` out of `buffer`.
    pub(super) fn copy(&mut self, buffer: &[u8], copy: &Copy) -> Result<()> {
        let (stream, g, size) = (copy.stream as usize, copy.gather, self.piece);
        let (mut row, mut skip) = (0u64, 0u64);
        while row < g.count {
            let at = g.at + row * g.at_step + skip;
            let (index, within) = (at / size, at % size);
            let room = size - within;
            // Whole runs that end in this piece, or the part of one that does.
            let whole = if skip == 0 && g.run <= room {
                ((room - g.run) / g.at_step.max(1) + 1).min(g.count - row)
            } else {
                0
            };
            let part = (g.run - skip).min(room);
            let (take, moved) = if whole > 0 { (g.run, whole) } else { (part, 1) };
            if let Some((bytes, put)) = self.piece_bytes(stream, index)? {
                *put += take * moved;
                let mut from = g.from + row * g.from_step + skip;
                let mut to = within;
                for _ in 0..moved {
                    let source = buffer.get(range(from, take)).unwrap_or_default();
                    if let Some(target) = bytes.get_mut(range(to, take))
                        && target.len() == source.len()
                    {
                        target.copy_from_slice(source);
                    }
                    (from, to) = (from + g.from_step, to + g.at_step);
                }
            }
            if whole > 0 {
                row += whole;
            } else if skip + part < g.run {
                skip += part;
            } else {
                (row, skip) = (row + 1, 0);
            }
        }
        Ok(())
    }

    /// Makes a range of a stream zero.
    pub(super) fn zero(&mut self, stream: u32, from: u64, to: u64) -> Result<()> {
        let (size, mut at) = (self.piece, from);
        while at < to {
            let end = ((at / size + 1) * size).min(to);
            if let Some((bytes, put)) = self.piece_bytes(stream as usize, at / size)?
                && let Some(bytes) = bytes.get_mut(range(at % size, end - at))
            {
                *put += end - at;
                bytes.fill(0);
            }
            at = end;
        }
        Ok(())
    }

    /// The bytes of a piece and how many were put into it, opened if need be; `None` for one that was complete from the
    /// start.
    fn piece_bytes(&mut self, stream: usize, index: u64) -> Result<Option<(&mut [u8], &mut u64)>> {
        let size = self.piece;
        let Some(state) = self.streams.get_mut(stream) else { return Ok(None) };
        if index < state.next || index.saturating_mul(size) >= state.bytes {
            return Ok(None);
        }
        let len = usize::try_from((state.bytes - index * size).min(size)).unwrap_or(0);
        if !state.open.contains_key(&index) {
            let mut slab = match self.free.pop() {
                Some(slab) => slab,
                None => Slab::new(Path::new("(memory)"), usize::try_from(size).unwrap_or(0))?,
            };
            let put = match state.spilled.remove(&index) {
                Some(put) => {
                    self.sink.reload(stream, index * size, slab.first(len))?;
                    put
                }
                None => 0,
            };
            state.open.insert(index, (slab, put));
            self.open += 1;
        }
        Ok(state.open.get_mut(&index).map(|(slab, put)| (slab.first(len), put)))
    }

    /// Notes that a stream is filled up to `to` and gives the pieces that are complete.
    pub(super) fn filled(
        &mut self,
        stream: u32,
        to: u64,
        mut give: impl FnMut(Piece) -> Result<()>,
    ) -> Result<()> {
        let (stream, size) = (stream as usize, self.piece);
        loop {
            let Some(state) = self.streams.get_mut(stream) else { return Ok(()) };
            let start = state.next.saturating_mul(size);
            let end = start.saturating_add(size).min(state.bytes);
            if start >= state.bytes || to < end {
                return Ok(());
            }
            let index = state.next;
            // A spilled one is read back. One that nobody filled has somebody else's bytes in it: it is never given.
            let put = self.piece_bytes(stream, index)?.map_or(0, |(_, put)| *put);
            if put < end - start {
                let problem = format!("bytes {start}..{end} of stream {stream} were not all filled");
                return Err(Refused::Relayout { problem }.into());
            }
            let Some(state) = self.streams.get_mut(stream) else { return Ok(()) };
            state.next += 1;
            if let Some((slab, _)) = state.open.remove(&index) {
                self.open -= 1;
                give(Piece { stream, start, len: usize::try_from(end - start).unwrap_or(0), slab })?;
            }
        }
    }

    /// Writes open pieces away until no more than allowed are left; those furthest on go first.
    pub(super) fn make_room(&mut self) -> Result<()> {
        while self.open > self.most {
            let furthest = self.streams.iter().enumerate().max_by_key(|(_, s)| s.open.len());
            let Some((number, _)) = furthest else { return Ok(()) };
            let Some(state) = self.streams.get_mut(number) else { return Ok(()) };
            let Some((index, (mut slab, put))) = state.open.pop_last() else { return Ok(()) };
            let start = index * self.piece;
            let len = usize::try_from((state.bytes - start).min(self.piece)).unwrap_or(0);
            self.sink.spill(number, start, slab.first(len))?;
            state.spilled.insert(index, put);
            self.open -= 1;
            self.free.push(slab);
        }
        Ok(())
    }

    /// Whether every stream is complete.
    pub(super) fn is_complete(&self) -> bool {
        self.streams.iter().all(|s| s.next.saturating_mul(self.piece) >= s.bytes)
    }
}

fn range(start: u64, len: u64) -> std::ops::Range<usize> {
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    start..start.saturating_add(usize::try_from(len).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather::Gather;
    use proptest::prelude::*;
    use std::sync::Mutex;

    /// Streams in memory.
    struct Memory(Mutex<Vec<Vec<u8>>>, Mutex<usize>);

    impl Memory {
        fn at(&self, stream: usize, start: u64, len: usize) -> (usize, std::ops::Range<usize>) {
            (stream, start as usize..start as usize + len)
        }
    }

    impl Sink for Memory {
        fn put(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()> {
            let (stream, range) = self.at(stream, start, bytes.len());
            self.0.lock().unwrap()[stream][range].copy_from_slice(bytes);
            Ok(())
        }

        fn spill(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()> {
            *self.1.lock().unwrap() += 1;
            self.put(stream, start, bytes)
        }

        fn reload(&self, stream: usize, start: u64, into: &mut [u8]) -> Result<()> {
            let (stream, range) = self.at(stream, start, into.len());
            into.copy_from_slice(&self.0.lock().unwrap()[stream][range]);
            Ok(())
        }
    }

    const PIECE: u64 = 8;
    const LEN: u64 = 45;

    /// Copies of single bytes in the given order into a stream, with one piece open at most; then everything is filled.
    fn filled_in(order: &[u64]) -> (Vec<u8>, usize) {
        let memory = Memory(Mutex::new(vec![vec![0xee; LEN as usize]]), Mutex::new(0));
        let buffer: Vec<u8> = (0..LEN as u8).collect();
        let mut open = Open::new(&memory, PIECE, &[(LEN, 0)], 1);
        for &at in order {
            open.copy(&buffer, &Copy { stream: 0, gather: Gather::contiguous(0, at, at, 1) }).unwrap();
            open.make_room().unwrap();
        }
        open.filled(0, LEN, |mut piece| {
            let bytes = piece.slab.first(piece.len).to_vec();
            memory.put(piece.stream, piece.start, &bytes)
        })
        .unwrap();
        assert!(open.is_complete());
        let spilled = *memory.1.lock().unwrap();
        (memory.0.into_inner().unwrap().remove(0), spilled)
    }

    proptest! {
        #[test]
        fn whatever_the_order_every_byte_is_where_it_belongs(order in Just((0..LEN).collect::<Vec<_>>()).prop_shuffle()) {
            let (found, spilled) = filled_in(&order);
            prop_assert_eq!(found, (0..LEN as u8).collect::<Vec<_>>());
            prop_assert!(spilled > 0, "one open piece is not enough for any order");
        }

        #[test]
        fn strided_copies_land_as_they_would_one_by_one(run in 1u64..12, count in 1u64..5, gap in 0u64..9, skip in 0u64..5) {
            let bytes = (run + gap) * count + skip;
            let memory = Memory(Mutex::new(vec![vec![0xee; bytes as usize]]), Mutex::new(0));
            let buffer: Vec<u8> = (0..(run + 1) * count).map(|i| i as u8 + 1).collect();
            let gather = Gather { source: 0, from: 0, at: skip, run, count, from_step: run + 1, at_step: run + gap };
            let mut wanted = vec![0u8; bytes as usize];
            for i in 0..count {
                for b in 0..run {
                    wanted[(skip + i * (run + gap) + b) as usize] = buffer[(i * (run + 1) + b) as usize];
                }
            }
            let mut open = Open::new(&memory, PIECE, &[(bytes, 0)], 100);
            open.zero(0, 0, bytes).unwrap();
            open.copy(&buffer, &Copy { stream: 0, gather }).unwrap();
            open.filled(0, bytes, |mut piece| {
                let bytes = piece.slab.first(piece.len).to_vec();
                memory.put(piece.stream, piece.start, &bytes)
            }).unwrap();
            prop_assert_eq!(memory.0.into_inner().unwrap().remove(0), wanted);
        }
    }

    #[test]
    fn a_piece_that_was_not_filled_is_never_given() {
        let memory = Memory(Mutex::new(vec![vec![0; LEN as usize]]), Mutex::new(0));
        let mut open = Open::new(&memory, PIECE, &[(LEN, 0)], 4);
        open.copy(&[1; 7], &Copy { stream: 0, gather: Gather::contiguous(0, 0, 0, 7) }).unwrap();
        assert!(open.filled(0, PIECE, |_| Ok(())).is_err());
    }
}
