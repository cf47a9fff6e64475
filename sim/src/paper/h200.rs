//! Our own chains on H200s (`docs/results/two-h200.md`), predicted from that page's rows of single copies.

use super::{
    Basis, Row, Table, Wanted,
    gb300::last_ms,
};
use crate::{Chunk, Error, Profile, Scenario, simulate};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// Chunk in MiB, and the last of four clones of 8 GiB in milliseconds, as the page prints them.
const ONE_GPU: [(u64, f64); 5] = [(128, 37.7), (256, 27.5), (512, 20.6), (1024, 19.3), (2048, 19.2)];
const ONE_GPU_VERIFIED: [(u64, f64); 5] = [(128, 50.9), (256, 44.9), (512, 43.2), (1024, 43.1), (2048, 41.9)];
const TWO_GPUS_VERIFIED: [(u64, f64); 8] = [
    (16, 130.0),
    (32, 66.8),
    (64, 50.3),
    (128, 48.8),
    (256, 48.9),
    (512, 50.1),
    (1024, 53.2),
    (2048, 58.0),
];

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
        Table { title: "Our chains on one H200".into(), note: String::new(), rows: of_one },
        Table {
            title: "Our chains over two H200s".into(),
            note: String::new(),
            rows: rows(&two, &TWO_GPUS_VERIFIED, true, None)?,
        },
    ])
}
