//! Pictures: who copied when, and how times go with what was varied. Every text in them is ours or a number.

use crate::{Filled, Outcome, Point, Span, Sweep};
use flashboot_core::ByteSize;
use std::{collections::BTreeMap, fmt::Write as _};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const ROW: f64 = 14.0;
/// GPUs that have a row, at most.
pub(crate) const ROWS: usize = 96;
const COLOURS: [&str; 4] = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0"];

fn begin(height: f64, title: &str) -> String {
    let width = LEFT + WIDTH + 30.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"16\" \
         font-size=\"13\">{title}</text>\n"
    )
}

/// A step of 1, 2 or 5 times a power of ten, of which five or so make `most`.
fn step(most: f64) -> f64 {
    let rough = (most / 5.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|step| *step >= rough).unwrap_or(power)
}

fn steps(most: f64) -> impl Iterator<Item = f64> {
    let step = step(most);
    (0..=20).map(move |n| f64::from(n) * step).take_while(move |at| *at <= most * 1.0001)
}

/// Who copied when: a row a GPU, a block a copy, shaded by its chunk; needs a scenario with `spans`.
pub fn timeline(outcome: &Outcome) -> String {
    let mut rows = BTreeMap::<(u32, u32), Vec<&Span>>::new();
    for span in &outcome.spans {
        rows.entry((span.clone, span.rank)).or_default().push(span);
    }
    let end = outcome.spans.iter().map(|span| span.to_ms).fold(0.0, f64::max).max(1e-9);
    let shown = rows.len().min(ROWS);
    let bottom = 28.0 + shown as f64 * ROW;
    let title = format!(
        "{} clones, {} a GPU in chunks of {}",
        outcome.clones.len(),
        ByteSize(outcome.image),
        ByteSize(outcome.chunk)
    );
    let mut svg = begin(bottom + 40.0, &title);
    let x = |ms: f64| LEFT + ms / end * WIDTH;
    for (n, ((clone, rank), spans)) in rows.iter().take(shown).enumerate() {
        let y = 28.0 + n as f64 * ROW;
        let label = if *rank == 0 { format!("clone {clone}") } else { format!("{clone} · {rank}") };
        let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{label}</text>", y + 10.0);
        for span in spans {
            let width = (x(span.to_ms) - x(span.from_ms)).max(0.3);
            let colour = COLOURS.get((span.chunk % 4) as usize).unwrap_or(&"#000");
            let from = span.source.map_or_else(|| "a seed".to_owned(), |clone| format!("clone {clone}"));
            let _ = writeln!(
                svg,
                "<rect x=\"{:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{colour}\"><title>chunk {} from {from}, \
                 {:.3} to {:.3} ms</title></rect>",
                x(span.from_ms),
                ROW - 3.0,
                span.chunk,
                span.from_ms,
                span.to_ms
            );
        }
    }
    for ms in steps(end) {
        let _ = writeln!(
            svg,
            "<line x1=\"{0:.1}\" y1=\"24\" x2=\"{0:.1}\" y2=\"{bottom:.1}\" stroke=\"#ccc\"/><text x=\"{0:.1}\" y=\"{1:.1}\" \
             text-anchor=\"middle\">{ms} ms</text>",
            x(ms),
            bottom + 14.0
        );
    }
    if rows.len() > shown {
        let _ =
            writeln!(svg, "<text x=\"4\" y=\"{:.1}\">and {} more</text>", bottom + 32.0, rows.len() - shown);
    }
    svg + "</svg>\n"
}

const HEIGHT: f64 = 320.0;

/// First, mean and last clone over what was varied.
pub fn curves(points: &[Point], sweep: Sweep) -> String {
    let title = match sweep {
        Sweep::Chunk => "time by chunk",
        Sweep::Clones => "time by number of clones",
    };
    let label = |point: &Point| match sweep {
        Sweep::Chunk => ByteSize(point.chunk).to_string(),
        Sweep::Clones => point.clones.to_string(),
    };
    let filled: Vec<_> = points.iter().filter_map(|p| Some((p, p.outcome.filled()?))).collect();
    let most = filled.iter().map(|(_, f)| f.last_ms).fold(0.0, f64::max).max(1e-9);
    let mut svg = begin(HEIGHT + 80.0, title);
    let x = |n: usize| LEFT + (n as f64 + 0.5) / filled.len().max(1) as f64 * WIDTH;
    let y = |ms: f64| 40.0 + HEIGHT - ms / most * HEIGHT;
    for ms in steps(most) {
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{0:.1}\" x2=\"{1}\" y2=\"{0:.1}\" stroke=\"#ddd\"/><text x=\"{2}\" y=\"{3:.1}\" \
             text-anchor=\"end\">{ms} ms</text>",
            y(ms),
            LEFT + WIDTH,
            LEFT - 6.0,
            y(ms) + 4.0
        );
    }
    for (n, (point, _)) in filled.iter().enumerate() {
        let at = HEIGHT + 58.0;
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{at}\" text-anchor=\"middle\">{}</text>",
            x(n),
            label(point)
        );
    }
    for (n, name) in ["first", "mean", "last"].into_iter().enumerate() {
        let of = |f: &Filled| [f.first_ms, f.mean_ms, f.last_ms].get(n).copied().unwrap_or(0.0);
        let colour = COLOURS.get(n).unwrap_or(&"#000");
        let places: Vec<String> =
            filled.iter().enumerate().map(|(n, (_, f))| format!("{:.1},{:.1}", x(n), y(of(f)))).collect();
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/><text x=\"{:.1}\" y=\"{}\" \
             fill=\"{colour}\">{name}</text>",
            places.join(" "),
            LEFT + 60.0 * n as f64,
            HEIGHT + 74.0
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, Scenario, simulate, sweep};

    #[test]
    fn a_timeline_has_a_row_a_clone_and_a_block_a_copy() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario { spans: true, ..Scenario::new(256 << 20, 3) };
        let outcome = simulate(&profile, &scenario).unwrap();
        let svg = timeline(&outcome);
        assert_eq!(svg.matches("<title>chunk").count() as u64, 3 * outcome.chunks);
        assert_eq!(svg.matches(">clone ").count(), 3);
        assert!(svg.contains("from a seed") && svg.contains("from clone 1"), "{svg}");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn curves_have_three_lines_and_a_label_a_point() {
        let profile = Profile::built_in("gb300").unwrap();
        let points = sweep(&profile, &Scenario::new(64 << 20, 4), Sweep::Clones).unwrap();
        let svg = curves(&points, Sweep::Clones);
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert!(!svg.contains("NaN") && !curves(&[], Sweep::Chunk).contains("NaN"));
    }

    #[test]
    fn steps_are_round() {
        assert_eq!([step(10.0), step(60.0), step(0.9)], [2.0, 20.0, 0.2]);
    }
}
