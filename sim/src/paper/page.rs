//! The page: every table, with what the rows mean.

use super::{Basis, Free, Mark, Row, Table, Wanted};
use crate::Profile;
use std::fmt::Write as _;

const HEAD: &str = "\
# The simulator against what was measured

Made by `cargo run --release -p flashboot-sim --example paper -- --write`; `sim/tests/paper.rs` checks that it is what the simulator says. How the
model works, and what it leaves out, is in [simulator.md](../simulator.md).

*fitted*: a free parameter was chosen so that this figure comes out. *predicted*: no parameter has seen it. *given*: the model takes a published
figure as it is. *assumed*: it rests on an assumption that nobody has shown. The error is against what was measured, against the nearer end where that is a
range. `within` is what was asked for before there was a simulator; where it says *ours* we chose the mark ourselves, with the figures in sight. Rows without one are
reported only. Figures of the paper are those of arXiv 2608.08482; those without a number in its text are not here.
";

/// The text of `docs/results/paper.md`: `gb300` with its [`tables`](super::tables).
pub fn page(gb300: &Profile, tables: &[Table]) -> String {
    let mut text = String::from(HEAD);
    if let Some(free) = Free::of(gb300) {
        parameters(&mut text, &free);
    }
    summary(&mut text, tables);
    for table in tables {
        let _ = write!(text, "\n## {}\n\n{}\n\n", table.title, table.note);
        text += "| where | what | measured | simulated | error | basis | within | |\n|---|---|---|---|---|---|---|---|\n";
        table.rows.iter().for_each(|row| line(&mut text, row));
    }
    text
}

fn parameters(text: &mut String, free: &Free) {
    let Free { rate, egress, start_us, chunk_us, duplex, jitter_us } = free;
    let _ = write!(
        text,
        "\n## The six free parameters of `gb300`\n\n\
         `cargo run --release -p flashboot-sim --example paper -- --fit` finds them from Table 2, Figure 5 and Figure 18; a test checks that the profile \
         holds what it finds.\n\n\
         | parameter | value | found from |\n|---|---|---|\n\
         | rate of one copy | {:.1} GB/s | Table 2, one copy 825 to 826 GB/s (Figure 5's plateau) |\n\
         | egress of a GPU, all readers together | {:.1} GB/s | Table 2, 837 to 839 GB/s |\n\
         | start of a copy, beside the copy before | {start_us:.2} µs | Figure 5, 47 GB/s at 1 MB |\n\
         | cost of a chunk on its link | {chunk_us:.2} µs | Figure 18, head 695 GB/s at 64 MB |\n\
         | left of the rate at a GPU that sends and receives | {duplex:.4} | Figure 18, head 748 GB/s at 2048 MB |\n\
         | standard deviation of the chunk's cost | {jitter_us:.2} µs | Figure 18, tail 60.1 ms at 256 MB |\n",
        rate / 1e9,
        egress / 1e9
    );
}

fn summary(text: &mut String, tables: &[Table]) {
    let rows = || tables.iter().flat_map(|table| &table.rows);
    let counted = |basis: Basis| {
        let marked = || rows().filter(|row| row.basis == basis && row.mark.is_some());
        let (met, of) = (marked().filter(|row| row.met() == Some(true)).count(), marked().count());
        (of > 0).then(|| format!("{met} of {of} {}", basis.name()))
    };
    let bases = [Basis::Predicted, Basis::Fitted, Basis::Assumed, Basis::Given];
    let counts: Vec<_> = bases.into_iter().filter_map(counted).collect();
    let _ = writeln!(text, "\nWithin their marks: {} rows.", counts.join(", "));
    for row in rows().filter(|row| row.met() == Some(false)) {
        let _ = writeln!(text, "- **missed** by {:+.1} %: {}, {}", row.error() * 100.0, row.figure, row.what);
    }
}

fn line(text: &mut String, row: &Row) {
    let unit = row.unit;
    let measured = match row.wanted {
        Wanted::About(value) => format!("{value} {unit}"),
        Wanted::Between(low, high) => format!("{low} to {high} {unit}"),
    };
    let digits = match row.simulated {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    let within = match row.mark {
        Some(Mark::Asked(within)) => format!("{:.0} %", within * 100.0),
        Some(Mark::Own(within)) => format!("{:.0} %, ours", within * 100.0),
        None => "–".to_owned(),
    };
    // Without a minus before a zero.
    let percent = (row.error() * 1000.0).round() / 10.0 + 0.0;
    let mark = match row.met() {
        Some(true) => "met",
        Some(false) => "**missed**",
        None => "",
    };
    let _ = writeln!(
        text,
        "| {} | {} | {measured} | {:.digits$} {unit} | {:+.1} % | {} | {within} | {mark} |",
        row.figure,
        row.what,
        row.simulated,
        percent,
        row.basis.name()
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::Basis;

    #[test]
    fn a_missed_row_is_printed_as_missed_at_the_top_and_in_its_line() {
        let row = |simulated: f64, basis: Basis, mark: Option<Mark>| Row {
            figure: "Figure 0",
            what: "something".into(),
            wanted: Wanted::About(100.0),
            unit: "ms",
            simulated,
            basis,
            mark,
        };
        let rows = vec![
            row(101.0, Basis::Fitted, Some(Mark::Own(0.02))),
            row(102.0, Basis::Predicted, Some(Mark::Asked(0.02))),
            row(110.0, Basis::Predicted, Some(Mark::Asked(0.02))),
            row(300.0, Basis::Assumed, None),
        ];
        let table = Table { title: String::new(), note: String::new(), rows };
        let mut text = String::new();
        summary(&mut text, std::slice::from_ref(&table));
        assert_eq!(
            text,
            "\nWithin their marks: 1 of 2 predicted, 1 of 1 fitted rows.\n- **missed** by +10.0 %: Figure 0, something\n"
        );
        let mut text = String::new();
        table.rows.iter().for_each(|row| line(&mut text, row));
        assert_eq!(
            text,
            "| Figure 0 | something | 100 ms | 101 ms | +1.0 % | fitted | 2 %, ours | met |\n\
             | Figure 0 | something | 100 ms | 102 ms | +2.0 % | predicted | 2 % | met |\n\
             | Figure 0 | something | 100 ms | 110 ms | +10.0 % | predicted | 2 % | **missed** |\n\
             | Figure 0 | something | 100 ms | 300 ms | +200.0 % | assumed | – |  |\n"
        );
    }
}
