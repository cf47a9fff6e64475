//! One figure: what was measured, what the model says, and how far apart the two may be.

/// Where the model's figure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// A parameter was chosen so that this figure comes out.
    Fitted,
    /// No parameter has seen this figure.
    Predicted,
    /// A published input that the model takes as it is.
    Given,
    /// It rests on an assumption that nobody has shown.
    Assumed,
}

impl Basis {
    /// Its name on the page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fitted => "fitted",
            Self::Predicted => "predicted",
            Self::Given => "given",
            Self::Assumed => "assumed",
        }
    }
}

/// How far a figure may be off, as a share, and who said so.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mark {
    /// Whoever ordered the simulator, before there was one.
    Asked(f64),
    /// We ourselves, with the figures in sight.
    Own(f64),
}

impl Mark {
    /// The share.
    pub fn within(self) -> f64 {
        let (Self::Asked(within) | Self::Own(within)) = self;
        within
    }
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Wanted {
    /// This.
    About(f64),
    /// Something from the first to the second.
    Between(f64, f64),
}

/// One figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Where it was read.
    pub figure: &'static str,
    /// What it is.
    pub what: String,
    /// What was measured.
    pub wanted: Wanted,
    /// Its unit.
    pub unit: &'static str,
    /// What the model says.
    pub simulated: f64,
    /// Where that comes from.
    pub basis: Basis,
    /// How far it may be off; `None`: reported only.
    pub mark: Option<Mark>,
}

impl Row {
    /// How far the model is off, as a share of what was measured: 0 inside of a range.
    pub fn error(&self) -> f64 {
        let off = |from: f64| (self.simulated - from) / from;
        match self.wanted {
            Wanted::About(value) => off(value),
            Wanted::Between(low, _) if self.simulated < low => off(low),
            Wanted::Between(_, high) if self.simulated > high => off(high),
            Wanted::Between(..) => 0.0,
        }
    }

    /// Whether it is near enough; `None` where nobody said how near that is.
    pub fn met(&self) -> Option<bool> {
        self.mark.map(|mark| self.error().abs() <= mark.within())
    }
}

/// Rows that belong together.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Their heading.
    pub title: String,
    /// What there is to say about them.
    pub note: String,
    /// The figures.
    pub rows: Vec<Row>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(wanted: Wanted, simulated: f64, within: Option<f64>) -> Row {
        let mark = within.map(Mark::Asked);
        let (figure, what, unit, basis) = ("", String::new(), "", Basis::Predicted);
        Row { figure, what, wanted, unit, simulated, basis, mark }
    }

    #[test]
    fn an_error_is_a_share_and_a_range_has_none_inside() {
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found}");
        near(row(Wanted::About(200.0), 190.0, None).error(), -0.05);
        near(row(Wanted::Between(100.0, 200.0), 150.0, None).error(), 0.0);
        near(row(Wanted::Between(100.0, 200.0), 90.0, None).error(), -0.1);
        near(row(Wanted::Between(100.0, 200.0), 220.0, None).error(), 0.1);
        assert_eq!(row(Wanted::About(100.0), 102.1, Some(0.02)).met(), Some(false));
        assert_eq!(row(Wanted::About(100.0), 98.1, Some(0.02)).met(), Some(true));
        assert_eq!(row(Wanted::About(100.0), 98.1, None).met(), None);
    }
}
