//! Our own chains on H200s: on one (`docs/results/one-h200.md`), where processes take turns, and over two (`docs/results/two-h200.md`).

use super::{
    Basis, Mark, Row, Table, Wanted,
    gb300::{last_ms, mean},
};
use crate::{Chunk, Error, Profile, Scenario};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// Chunk in MiB, and the last of four clones of 8 GiB in milliseconds, as the pages print them.
const ONE_GPU: [(u64, f64); 5] = [(128, 22.6), (256, 20.5), (512, 19.0), (1024, 18.0), (2048, 17.9)];
const ONE_GPU_VERIFIED: [(u64, f64); 5] = [(128, 50.1), (256, 43.2), (512, 42.7), (1024, 43.0), (2048, 41.8)];
const TWO_GPUS_VERIFIED: [(u64, f64); 8] =
    [(16, 130.0), (32, 66.8), (64, 50.3), (128, 48.8), (256, 48.9), (512, 50.1), (1024, 53.2), (2048, 58.0)];

/// The chunk whose timeline the turns are fitted to, and one whose row has corrected a number.
const FITTED: [u64; 2] = [512, 128];

const ON_ONE: &str = "\
Profile `h200`: rate and start from the single copies' GPU column at 256 MiB and 1 GiB. Processes of one GPU take turns, round and round, in an order that is \
drawn: a slice of 2.09 ms, a change of 140 µs, and an interrupted copy goes on in the next slice. These two, a copy's own cost, and how late a host \
notices the end of a copy that waited long for its turn are fitted to the timeline of the chain of 512 MiB, not verified. At first a copy's start had the \
host's lead in it, 35 µs; the row of 128 MiB, then 36.5 ms, showed that it has not. For the others no number was changed, but what there is in the model was chosen \
with all rows in sight. The mark, 5 % at three chunk sizes, does not say of which chains: it stands at all of them, and most verified ones \
miss it (the model hashes within a copy's turn; what the real ones do between is not known). Simulated is \
a mean over 16 orders, measured a median of 7 repeats.";

const OVER_TWO: &str = "\
Profile `h200x2`: rates from single copies and from copies side by side, no row of a chain used. Reported without a mark. Below 64 MiB a chunk costs the \
real chain 250 µs of hosts' time with two processes on each GPU, which the model does not have; nor do these take turns in it. The rows are verified, so \
that the bench of that day, whose finished clones compared unverified bytes while others copied, did not disturb them.";

fn chain(profile: &Profile, chunk: u64, verify: bool) -> Result<f64, Error> {
    let scenario = Scenario { chunk: Chunk::Bytes(chunk), verify, ..Scenario::new(8 * GIB, 4) };
    mean(profile, &scenario, last_ms)
}

fn rows(
    profile: &Profile,
    measured: &[(u64, f64)],
    verify: bool,
    mark: Option<Mark>,
) -> Result<Vec<Row>, Error> {
    let alone = profile.gpus() == 1;
    let (figure, name) = if alone { ("one-h200.md", "one GPU") } else { ("two-h200.md", "two GPUs") };
    let how = if verify { "verified" } else { "not verified" };
    measured
        .iter()
        .map(|(mib, ms)| {
            Ok(Row {
                figure,
                what: format!("chain of 4, 8 GiB, {name}, {how}, {mib} MiB: last clone"),
                wanted: Wanted::About(*ms),
                unit: "ms",
                simulated: chain(profile, mib * MIB, verify)?,
                basis: if alone && !verify && FITTED.contains(mib) {
                    Basis::Fitted
                } else {
                    Basis::Predicted
                },
                mark,
            })
        })
        .collect()
}

pub(super) fn tables() -> Result<Vec<Table>, Error> {
    let (one, two) = (Profile::built_in("h200")?, Profile::built_in("h200x2")?);
    let asked = Some(Mark::Asked(0.05));
    let mut of_one = rows(&one, &ONE_GPU, false, asked)?;
    of_one.extend(rows(&one, &ONE_GPU_VERIFIED, true, asked)?);
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

    const ONE: &str = include_str!("../../../docs/results/one-h200.md");
    const TWO: &str = include_str!("../../../docs/results/two-h200.md");

    /// A page's rows of `bench chunk`: chunk, and the sixth column after it.
    fn printed(text: &str, section: &str) -> Vec<(u64, f64)> {
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
        assert_eq!(printed(ONE, &bench("cuda:0", "128MiB..2GiB --repeats 7 --no-verify")), ONE_GPU);
        assert_eq!(printed(ONE, &bench("cuda:0", "128MiB..2GiB --repeats 7")), ONE_GPU_VERIFIED);
        assert_eq!(printed(TWO, &bench("cuda:0,1", "16MiB..2GiB --repeats 3")), TWO_GPUS_VERIFIED);
    }
}
