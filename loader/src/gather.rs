//! Reads of scattered bytes: rows as single reads, columns through a bounce buffer, neighbours in one read.
//!
//! Every page of a tensor whose columns are cut holds bytes that are needed, so whole rows are read and the columns copied
//! out of them: one long read instead of thousands of short ones.

use crate::io::{BOUNCE, Lane, SourceFile};
use flashboot_checkpoint::Gather;
use flashboot_core::{Error, Kind, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows are read with what lies between them, unless that is more than this: every page would be read anyway, and up to here
/// reading on is faster than reading anew.
const GAP: u64 = 64 << 10;
/// Contiguous bytes from here on are read in place where they lie alike in file and memory.
const IN_PLACE: u64 = 256 << 10;

/// From here on a call for each part costs less than copying all of them once more.
const COPIED_ALONE: u64 = 16 << 10;

/// Bytes asked of files by gathers, before they are rounded to pages.
#[derive(Debug, Default)]
pub struct Requested {
    needed: AtomicU64,
    requested: AtomicU64,
    paged: AtomicU64,
}

impl Requested {
    /// Bytes that go somewhere.
    pub fn needed(&self) -> u64 {
        self.needed.load(Ordering::Relaxed)
    }

    /// Bytes read for them: whole rows where columns are kept.
    pub fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// The same with the pages at both ends of each read: what was asked of the system.
    pub fn paged(&self) -> u64 {
        self.paged.load(Ordering::Relaxed)
    }
}

/// One read, and what of it goes where: the parts numbered so, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Step {
    file: u32,
    from: u64,
    end: u64,
    parts: Vec<Gather>,
}

/// Fills `into` with `parts`, whose `source` is the number of a file and whose `at` counts from `into`'s first byte. What no
/// part fills becomes zero.
///
/// # Errors
/// [`Kind::Invalid`] for a part that does not fit, and the reads' own.
pub fn read(
    lane: &mut Lane,
    files: &[SourceFile],
    parts: &[Gather],
    into: &mut [u8],
    counts: &Requested,
) -> Result<()> {
    zero_gaps(parts, into)?;
    let steps = steps(parts);
    let mut bounce = lane.bounce()?;
    let mut read = || steps.iter().try_for_each(|step| one(lane, files, step, &mut bounce, into, counts));
    let done = read();
    lane.keep_bounce(bounce);
    done
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, "gather", what)
}

fn one(
    lane: &mut Lane,
    files: &[SourceFile],
    step: &Step,
    bounce: &mut flashboot_memory::Buffer,
    into: &mut [u8],
    counts: &Requested,
) -> Result<()> {
    let file = usize::try_from(step.file).ok().and_then(|n| files.get(n));
    let file = file.ok_or_else(|| invalid(format!("there is no file number {}", step.file)))?;
    let needed: u64 = step.parts.iter().map(Gather::bytes).sum();
    counts.needed.fetch_add(needed, Ordering::Relaxed);
    counts.requested.fetch_add(step.end - step.from, Ordering::Relaxed);
    let page = file.alignment().max(4096);
    if let [part] = step.parts.as_slice()
        && part.count == 1
        && part.run >= IN_PLACE
    {
        let place = range(into.len(), part.at, part.run)?;
        let target = into.get_mut(place).unwrap_or_default();
        // Where they lie alike, all but a few bytes at both ends is read directly.
        let skew = (part.from % page) as usize;
        if (target.as_ptr() as usize) as u64 % page == skew as u64 {
            let head = usize::try_from((page - part.from % page) % page).unwrap_or(0).min(target.len());
            let body = (target.len() - head) / 4096 * 4096;
            let (first, rest) = target.split_at_mut(head);
            let (middle, last) = rest.split_at_mut(body);
            let mut at = part.from;
            counts.paged.fetch_add(part.run, Ordering::Relaxed);
            for piece in [first, middle, last] {
                let len = piece.len() as u64;
                if len > 0 {
                    lane.read(file, at, piece, &mut |_, _| Ok(()))?;
                }
                at += len;
            }
            return Ok(());
        }
    }
    let len = usize::try_from(step.end - step.from).unwrap_or(usize::MAX);
    if step.parts.iter().all(|part| part.count == 1 && part.run >= COPIED_ALONE)
        && lane.is_cached(file, step.from, len)
    {
        // A copy from the page cache wants no alignment, and a second one in memory costs as much again.
        for part in &step.parts {
            let target = into.get_mut(range(into.len(), part.at, part.run)?).unwrap_or_default();
            counts.paged.fetch_add(part.run, Ordering::Relaxed);
            lane.read(file, part.from, target, &mut |_, _| Ok(()))?;
        }
        return Ok(());
    }
    let start = step.from / page * page;
    let whole = step.end.next_multiple_of(page).min(file.len().next_multiple_of(4096)) - start;
    let len = usize::try_from(whole).unwrap_or(usize::MAX);
    let bytes = bounce
        .as_mut_slice()
        .get_mut(..len)
        .ok_or_else(|| invalid("a read longer than the bounce buffer"))?;
    if step.end > file.len() {
        let detail =
            format!("{}: bytes up to {} of a file of {}", file.path().display(), step.end, file.len());
        return Err(Error::new(Kind::Corrupt, "pread", detail));
    }
    counts.paged.fetch_add(whole.min(file.len() - start), Ordering::Relaxed);
    lane.read(file, start, bytes, &mut |_, _| Ok(()))?;
    step.parts.iter().try_for_each(|part| scatter(part, start, bytes, into))
}

/// Copies the runs of `part` out of `bytes`, which begin at `start` of its file.
fn scatter(part: &Gather, start: u64, bytes: &[u8], into: &mut [u8]) -> Result<()> {
    let run = usize::try_from(part.run).unwrap_or(usize::MAX);
    let (mut from, mut at) =
        (part.from.checked_sub(start).ok_or_else(|| invalid("a run before its read"))?, part.at);
    for _ in 0..part.count {
        let source = bytes.get(range(bytes.len(), from, part.run)?).unwrap_or_default();
        let target = into.get_mut(range(into.len(), at, part.run)?).unwrap_or_default();
        if source.len() != run || target.len() != run {
            return Err(invalid("a run that does not fit"));
        }
        target.copy_from_slice(source);
        from += part.from_step;
        at += part.at_step;
    }
    Ok(())
}

fn range(len: usize, at: u64, bytes: u64) -> Result<std::ops::Range<usize>> {
    let end = at.checked_add(bytes).and_then(|end| usize::try_from(end).ok()).filter(|end| *end <= len);
    let end = end.ok_or_else(|| invalid(format!("{bytes} bytes at {at} of {len}")))?;
    Ok(end - usize::try_from(bytes).unwrap_or(0)..end)
}

/// Sets what no part fills to zero; where parts interleave, everything.
fn zero_gaps(parts: &[Gather], into: &mut [u8]) -> Result<()> {
    let dense = |part: &Gather| part.count <= 1 || part.at_step == part.run;
    if !parts.iter().all(dense) {
        into.fill(0);
        return Ok(());
    }
    let mut spans: Vec<(u64, u64)> =
        parts.iter().filter(|p| p.bytes() > 0).map(|p| (p.at, p.bytes())).collect();
    spans.sort_unstable();
    let mut end = 0u64;
    for (at, bytes) in spans.into_iter().chain([(into.len() as u64, 0)]) {
        if at > end {
            into.get_mut(range(into.len(), end, at - end)?).unwrap_or_default().fill(0);
        }
        end = end.max(at.saturating_add(bytes));
    }
    Ok(())
}

/// The reads for some parts: by file and place, none longer than a bounce buffer, neighbours joined.
fn steps(parts: &[Gather]) -> Vec<Step> {
    // Two pages for the ends.
    const MOST: u64 = BOUNCE as u64 - (2 << 16);
    let mut cut: Vec<Gather> = Vec::with_capacity(parts.len());
    for part in parts.iter().filter(|part| part.bytes() > 0) {
        let part = part.normal();
        let span = |g: &Gather| g.from_end().unwrap_or(u64::MAX).saturating_sub(g.from);
        if part.count > 1 && part.from_step - part.run <= GAP && part.run <= MOST {
            // As many rows at a time as fit.
            let rows = (MOST.saturating_sub(part.run) / part.from_step.max(1) + 1).min(part.count);
            let mut first = 0;
            while first < part.count {
                let count = rows.min(part.count - first);
                let (from, at) = (part.from + first * part.from_step, part.at + first * part.at_step);
                cut.push(Gather { from, at, count, ..part });
                debug_assert!(cut.last().is_some_and(|g| span(g) <= MOST));
                first += count;
            }
            continue;
        }
        for row in 0..part.count {
            let (from, at) = (part.from + row * part.from_step, part.at + row * part.at_step);
            let mut done = 0;
            while done < part.run {
                let len =
                    if part.count == 1 && part.run <= MOST { part.run } else { MOST.min(part.run - done) };
                cut.push(Gather::contiguous(part.source, from + done, at + done, len));
                done += len;
            }
        }
    }
    cut.sort_by_key(|g| (g.source, g.from));
    let mut steps: Vec<Step> = Vec::new();
    for part in cut {
        let end = part.from_end().unwrap_or(u64::MAX);
        match steps.last_mut() {
            // Touching, or over one another: columns of one tensor that go to different places.
            Some(last)
                if last.file == part.source
                    && part.from <= last.end
                    && end.max(last.end) - last.from <= MOST =>
            {
                last.end = last.end.max(end);
                last.parts.push(part);
            }
            _ => steps.push(Step { file: part.source, from: part.from, end, parts: vec![part] }),
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Io, IoConfig};
    use proptest::prelude::*;

    #[test]
    fn columns_of_a_tensor_are_read_row_by_row_together_and_split_where_they_do_not_fit() {
        // 5120 rows of 1152 bytes, 288 of each: what one of four ranks takes of a w2.
        let w2 = Gather { source: 0, from: 100, at: 0, run: 288, count: 5120, from_step: 1152, at_step: 288 };
        let found = steps(&[w2]);
        assert_eq!((found.len(), found[0].from, found[0].end), (1, 100, 100 + 5119 * 1152 + 288));
        let large = Gather { count: 51_200, ..w2 };
        let found = steps(&[large]);
        assert_eq!(found.iter().flat_map(|s| &s.parts).map(|p| p.count).sum::<u64>(), 51_200);
        assert!(found.len() == 8 && found.iter().all(|s| s.end - s.from <= BOUNCE as u64));
        // Rows far apart are read alone.
        let far = Gather { from_step: 1 << 20, count: 3, ..w2 };
        assert_eq!(steps(&[far]).len(), 3);
    }

    #[test]
    fn neighbours_are_one_read() {
        let g = |from, at| Gather::contiguous(0, from, at, 10);
        let found = steps(&[g(10, 50), g(0, 0), g(21, 70), Gather { source: 1, ..g(20, 30) }]);
        let reads: Vec<_> = found.iter().map(|s| (s.file, s.from, s.end)).collect();
        assert_eq!(reads, [(0, 0, 20), (0, 21, 31), (1, 20, 30)]);
    }

    fn any_part() -> impl Strategy<Value = (u64, u64, u64, u64, u64)> {
        (0u64..300_000, 1u64..3000, 1u64..40, 0u64..3000, prop_oneof![Just(0u64), 0u64..70_000])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn every_byte_is_asked_for_once_and_lands_where_it_belongs(given in prop::collection::vec(any_part(), 0..12)) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("f");
            let data: Vec<u8> = (0..4_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            std::fs::write(&path, &data).unwrap();
            let io = Io::new(&IoConfig::default()).unwrap();
            let files = [io.open(&path).unwrap()];
            let (mut at, mut parts, mut last) = (0, Vec::new(), 0);
            for (from, run, count, at_gap, from_gap) in given {
                // Apart in the file too, as tensors are.
                let from = last + from % 1000;
                let g = Gather { source: 0, from, at, run, count, from_step: run + from_gap, at_step: run + at_gap % 7 };
                if g.from_end().unwrap() > data.len() as u64 {
                    break;
                }
                last = g.from_end().unwrap();
                at = g.at_end().unwrap() + at_gap;
                parts.push(g);
            }
            let mut into = vec![9u8; at as usize + 5];
            let mut wanted = vec![0u8; into.len()];
            for g in &parts {
                for i in 0..g.count {
                    let (from, to) = ((g.from + i * g.from_step) as usize, (g.at + i * g.at_step) as usize);
                    wanted[to..to + g.run as usize].copy_from_slice(&data[from..from + g.run as usize]);
                }
            }
            let counts = Requested::default();
            read(&mut io.lane(), &files, &parts, &mut into, &counts).unwrap();
            prop_assert!(into == wanted);
            let needed: u64 = parts.iter().map(Gather::bytes).sum();
            prop_assert_eq!(counts.needed(), needed);
            let spans = |g: &Gather| if g.from_step - g.run <= GAP { g.from_end().unwrap() - g.from } else { g.bytes() };
            prop_assert_eq!(counts.requested(), parts.iter().map(spans).sum::<u64>());
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, [1; 100]).unwrap();
        let io = Io::new(&IoConfig::default()).unwrap();
        let files = [io.open(&path).unwrap()];
        let mut into = [0; 10];
        let counts = Requested::default();
        for (part, kind) in [
            (Gather::contiguous(0, 0, 5, 6), Kind::Invalid),
            (Gather::contiguous(1, 0, 0, 6), Kind::Invalid),
            (Gather::contiguous(0, 95, 0, 6), Kind::Corrupt),
        ] {
            let e = read(&mut io.lane(), &files, &[part], &mut into, &counts).unwrap_err();
            assert_eq!(e.kind(), kind, "{e}");
        }
    }
}
