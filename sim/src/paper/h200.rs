//! Our own chains on H200s (`docs/results/two-h200.md`), predicted from that page's rows of single copies.

use super::{Basis, Row, Table, Wanted, gb300::last_ms};
use crate::{Chunk, Error, Profile, Scenario, simulate};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// Chunk in MiB, and the last of four clones of 8 GiB in milliseconds, as the page prints them.
const ONE_GPU: [(u64, f64); 5] = [(128, 37.7), (256, 27.5), (512, 20.6), (1024, 19.3), (2048, 19.2)];
const ONE_GPU_VERIFIED: [(u64, f64); 5] = [(128, 50.9), (256, 44.9), (512, 43.2), (1024, 43.1), (2048, 41.9)];
const TWO_GPUS_VERIFIED: [(u64, f64); 8] =
    [(16, 130.0), (32, 66.8), (64, 50.3), (128, 48.8), (256, 48.9), (512, 50.1), (1024, 53.2), (2048, 58.0)];

const ON_ONE: &str = "\
Profile `h200`: rate and start from the single copies' GPU column at 256 MiB and 1 GiB. Processes of one GPU take turns, and a change of turn is taken to \
cost what a single copy spends outside the GPU's events (lead and trail, 87 µs): of a chain on one GPU nothing overlaps it. That is an assumption; no row of \
a chain was used. The mark, 5 % at three chunk sizes, is for chains without verification; a verified chunk is hashed within its turn, which is too much at \
128 and 256 MiB. At 2 GiB, four chunks in all, real turns are longer than the model's.";

const OVER_TWO: &str = "\
Profile `h200x2`: rates from single copies and from copies side by side, no row of a chain used. Reported without a mark. Below 64 MiB a chunk costs the \
real chain 250 µs of hosts' time with two processes on each GPU, which the model does not have.";

fn chain(profile: &Profile, chunk: u64, verify: bool) -> Result<f64, Error> {
    let scenario = Scenario { chunk: Chunk::Bytes(chunk), verify, ..Scenario::new(8 * GIB, 4) };
    Ok(last_ms(&simulate(profile, &scenario)?))
}

fn rows(
    profile: &Profile,
    measured: &[(u64, f64)],
    verify: bool,
    within: Option<f64>,
) -> Result<Vec<Row>, Error> {
    let name = if profile.gpus() == 1 { "one GPU" } else { "two GPUs" };
    let how = if verify { "verified" } else { "not verified" };
    measured
        .iter()
        .map(|(mib, ms)| {
            Ok(Row {
                figure: "two-h200.md",
                what: format!("chain of 4, 8 GiB, {name}, {how}, {mib} MiB: last clone"),
                wanted: Wanted::About(*ms),
                unit: "ms",
                simulated: chain(profile, mib * MIB, verify)?,
                basis: Basis::Predicted,
                within,
            })
        })
        .collect()
}

pub(super) fn tables() -> Result<Vec<Table>, Error> {
    let (one, two) = (Profile::built_in("h200")?, Profile::built_in("h200x2")?);
    let mut of_one = rows(&one, &ONE_GPU, false, Some(0.05))?;
    of_one.extend(rows(&one, &ONE_GPU_VERIFIED, true, None)?);
    Ok(vec![
        Table { title: "Our chains on one H200".into(), note: ON_ONE.into(), rows: of_one },
        Table {
            title: "Our chains over two H200s".into(),
            note: OVER_TWO.into(),
            rows: rows(&two, &TWO_GPUS_VERIFIED, true, None)?,
        },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page's rows of `bench chunk`: chunk, and the eighth column after it.
    fn printed(section: &str) -> Vec<(u64, f64)> {
        let text = include_str!("../../../docs/results/two-h200.md");
        let (_, rest) = text.split_once(section).unwrap();
        let rest = rest.split("\n$ ").next().unwrap();
        let rows = rest.lines().filter(|line| line.starts_with("chain"));
        let cells =
            rows.map(|line| line.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect::<Vec<_>>());
        cells
            .map(|cells| {
                let chunk: flashboot_core::ByteSize = cells[3].parse().unwrap();
                let last = cells[9].strip_suffix(" ms").unwrap();
                (chunk.0 / MIB, last.parse().unwrap())
            })
            .collect()
    }

    #[test]
    fn what_is_compared_with_is_what_the_page_prints() {
        let bench = |gpus: &str, rest: &str| {
            format!("bench chunk --device {gpus} --clones 4 --size 8GiB --chunks {rest}\n")
        };
        assert_eq!(printed(&bench("cuda:0", "128MiB..2GiB --repeats 5 --no-verify")), ONE_GPU);
        assert_eq!(printed(&bench("cuda:0", "128MiB..2GiB --repeats 5")), ONE_GPU_VERIFIED);
        assert_eq!(printed(&bench("cuda:0,1", "16MiB..2GiB --repeats 3")), TWO_GPUS_VERIFIED);
    }
}
