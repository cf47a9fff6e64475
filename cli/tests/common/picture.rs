//! A picture of a few lines, as SVG.
#![allow(clippy::unwrap_used, reason = "tests panic where they fail")]

use std::fmt::Write as _;

/// One line, and how it is shown.
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) colour: &'static str,
    pub(crate) dashed: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Lines over whole numbers, from zero.
pub(crate) struct Picture<'l> {
    pub(crate) title: &'static str,
    pub(crate) across: &'static str,
    pub(crate) up: &'static str,
    pub(crate) lines: &'l [Line],
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 440.0;
/// Of the plane that is drawn on: left, top, right, bottom.
const EDGES: [f64; 4] = [60.0, 50.0, 700.0, 390.0];

impl Picture<'_> {
    pub(crate) fn svg(&self) -> String {
        let most = |of: fn(&(f64, f64)) -> f64| {
            let points = self.lines.iter().flat_map(|line| &line.points);
            points.map(of).fold(1.0, f64::max).ceil()
        };
        let (right, top) = (most(|p| p.0), most(|p| p.1));
        let [x0, y0, x1, y1] = EDGES;
        let x = |value: f64| x0 + (x1 - x0) * value / right;
        let y = |value: f64| y1 - (y1 - y0) * value / top;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
        );
        let text = |at: (f64, f64), anchor: &str, turn: f64, said: &str| {
            let (ax, ay) = at;
            format!(
                "<text x=\"{ax:.1}\" y=\"{ay:.1}\" text-anchor=\"{anchor}\" transform=\"rotate({turn} {ax:.1} {ay:.1})\">{said}</text>\n"
            )
        };
        svg += &text((WIDTH / 2.0, 26.0), "middle", 0.0, self.title);
        svg += &text((WIDTH / 2.0, HEIGHT - 12.0), "middle", 0.0, self.across);
        svg += &text((20.0, HEIGHT / 2.0), "middle", -90.0, self.up);
        for mark in 0..=right as u32 {
            svg += &text((x(mark.into()), y1 + 20.0), "middle", 0.0, &mark.to_string());
        }
        for mark in 0..=top as u32 {
            let at = y(mark.into());
            writeln!(svg, "<line x1=\"{x0}\" y1=\"{at:.1}\" x2=\"{x1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>")
                .unwrap();
            svg += &text((x0 - 8.0, at + 4.0), "end", 0.0, &mark.to_string());
        }
        for (number, Line { name, colour, dashed, points }) in self.lines.iter().enumerate() {
            let dash = if *dashed { " stroke-dasharray=\"6 4\"" } else { "" };
            let path: Vec<_> = points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
            let stroke = format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}");
            writeln!(svg, "<polyline points=\"{}\" {stroke}/>", path.join(" ")).unwrap();
            if !dashed {
                for p in points {
                    writeln!(
                        svg,
                        "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"/>",
                        x(p.0),
                        y(p.1)
                    )
                    .unwrap();
                }
            }
            let at = y0 + 16.0 + 20.0 * number as f64;
            writeln!(svg, "<polyline points=\"{0},{at} {1},{at}\" {stroke}/>", x0 + 16.0, x0 + 52.0).unwrap();
            svg += &text((x0 + 60.0, at + 4.0), "start", 0.0, name);
        }
        svg + "</svg>\n"
    }
}
