//! Numbers as people read them.

/// `86.7 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    scaled(n as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// `7.9 GB/s`.
pub(crate) fn rate(per_second: f64) -> String {
    scaled(per_second, 1000.0, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])
}

fn scaled(n: f64, step: f64, units: &[&str]) -> String {
    let (mut n, mut unit) = (n, units.iter());
    let mut name = unit.next().copied().unwrap_or_default();
    let mut whole = true;
    for next in unit {
        // Below the rounding to `1024 KiB`.
        if n < step - 0.05 {
            break;
        }
        (n, name, whole) = (n / step, next, false);
    }
    match (whole, n >= 99.95) {
        (true, _) | (_, true) => format!("{n:.0} {name}"),
        _ => format!("{n:.1} {name}"),
    }
}

/// `12.3 ms`, `1.23 s`.
pub(crate) fn ms(ms: f64) -> String {
    if ms >= 999.5 {
        format!("{:.2} s", ms / 1e3)
    } else if ms >= 99.95 {
        format!("{ms:.0} ms")
    } else {
        format!("{ms:.1} ms")
    }
}

/// `1 clone`, `4 clones`.
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// `text` without characters that steer a terminal; `lines` says whether it may have several.
pub(crate) fn plain(text: &str, lines: bool) -> String {
    let steers = |c: char| {
        // Beside the controls those that turn the direction of writing round.
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        turns || (c.is_control() && !(lines && c == '\n'))
    };
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if steers(c) {
            plain.extend(c.escape_default());
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        for (n, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (90_868_376, "86.7 MiB"),
            (1 << 40, "1.0 TiB"),
            ((1 << 20) - 1, "1.0 MiB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        assert_eq!(rate(7.94e9), "7.9 GB/s");
        assert_eq!(rate(0.0), "0 B/s");
        assert_eq!(ms(0.04), "0.0 ms");
        assert_eq!(ms(12.34), "12.3 ms");
        assert_eq!(ms(123.4), "123 ms");
        assert_eq!(ms(1234.0), "1.23 s");
        assert_eq!((count(1, "clone"), count(0, "clone")), ("1 clone".into(), "0 clones".into()));
    }

    #[test]
    fn what_steers_a_terminal_is_escaped() {
        assert_eq!(plain("a\u{1b}[31m\rb\nc → ü\u{202e}", true), "a\\u{1b}[31m\\rb\nc → ü\\u{202e}");
        assert_eq!(plain("a\nb", false), "a\\nb");
    }
}
