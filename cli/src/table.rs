//! Aligned columns.

use std::fmt::Write as _;

/// On which side of its column a cell stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Rows under headings.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(columns: &[(&'static str, Side)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The text, every line ended and without trailing blanks.
    pub(crate) fn render(&self) -> String {
        let heads: Vec<String> = self.columns.iter().map(|(head, _)| (*head).to_owned()).collect();
        let width = |column: usize| {
            let cells = std::iter::once(&heads).chain(&self.rows).filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let rule = widths.iter().map(|w| "─".repeat(*w)).collect();
        let mut text = String::new();
        for row in [heads, rule].iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), (_, side)) in row.iter().zip(&widths).zip(&self.columns) {
                let blanks = " ".repeat(width.saturating_sub(cell.chars().count()));
                match side {
                    Side::Left => line += &format!("{cell}{blanks}  "),
                    Side::Right => line += &format!("{blanks}{cell}  "),
                }
            }
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("name", Side::Left), ("n", Side::Right)]);
        table.row(vec!["a".into(), "100".into()]);
        table.row(vec!["größer".into(), "5".into()]);
        assert_eq!(table.render(), "name      n\n──────  ───\na       100\ngrößer    5\n");
    }
}
