//! `docs/results/paper.md` is what the simulator says, and says of itself what holds.
#![allow(clippy::unwrap_used)]

use flashboot_sim::{
    Profile,
    paper::{self, Basis, Row, Table},
};
use std::sync::LazyLock;

static TABLES: LazyLock<Vec<Table>> = LazyLock::new(|| paper::tables(&gb300()).unwrap());

fn gb300() -> Profile {
    Profile::built_in("gb300").unwrap()
}

const PAGE: &str = include_str!("../../docs/results/paper.md");

#[test]
fn the_page_is_what_the_command_prints() {
    let made = paper::page(&gb300(), &TABLES);
    assert_eq!(PAGE, made, "make it anew: cargo run --release -p flashboot-sim --example paper -- --write");
}

#[test]
fn what_was_asked_for_is_met_or_printed_as_missed() {
    let rows: Vec<&Row> = TABLES.iter().flat_map(|table| &table.rows).collect();
    let of_paper = |row: &&&Row| !row.figure.ends_with("h200.md") && row.mark.is_some();
    let missed: Vec<_> = rows.iter().filter(of_paper).filter(|row| row.met() != Some(true)).collect();
    assert!(missed.is_empty(), "{missed:#?}");
    assert!(rows.iter().filter(of_paper).filter(|row| row.basis == Basis::Predicted).count() >= 20);
    let ours = rows.iter().filter(|row| row.figure == "one-h200.md" && row.met() == Some(true));
    let ours = ours.filter(|row| row.basis == Basis::Predicted);
    assert!(ours.count() >= 3, "the h200 profile's chains at three chunk sizes that it was not fitted to");
    for row in rows.iter().filter(|row| row.met() == Some(false)) {
        assert!(PAGE.lines().any(|line| line.contains("**missed**") && line.contains(&row.what)), "{row:?}");
    }
}

#[test]
fn a_worse_model_is_seen() {
    // Without the cost of sending and receiving at once the chain's figures are off, whatever else is fitted.
    let mut profile = gb300();
    profile.gpu.duplex = 1.0;
    let tables = paper::tables(&profile).unwrap();
    let missed = |what: &str| {
        let mut rows = tables.iter().flat_map(|table| &table.rows);
        rows.any(|row| row.what.contains(what) && row.met() == Some(false))
    };
    assert!(missed("chain, Pro, N = 8, head") && missed("ring all-gather, Pro, N = 8"));
    assert!(!missed("star, Pro"));
}
