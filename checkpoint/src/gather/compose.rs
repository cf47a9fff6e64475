//! Two gathers of one source, composed: what the first put into an image, taken from there by the second.

use super::Gather;

/// The bytes that `image` and `wanted` (both of one source) have in common, as gathers from where `image` put
/// them to where `wanted` puts them; their source is `number`. Bytes that only one of them has are left out.
pub(crate) fn compose(image: &Gather, wanted: &Gather, number: u32, take: &mut dyn FnMut(Gather)) {
    let (a, b) = (image.normal(), wanted.normal());
    if a.bytes() == 0 || b.bytes() == 0 {
        return;
    }
    let mut give = |g: Gather| take(g.normal());
    if a.count == 1 {
        b.within(a.from, a.from.saturating_add(a.run), |part| {
            let from = a.at.saturating_add(part.from.saturating_sub(a.from));
            give(Gather { source: number, from, ..part });
        });
    } else if b.count == 1 {
        a.within(b.from, b.from.saturating_add(b.run), |part| {
            let at = b.at.saturating_add(part.from.saturating_sub(b.from));
            give(Gather {
                source: number,
                from: part.at,
                at,
                run: part.run,
                count: part.count,
                from_step: part.at_step,
                at_step: part.from_step,
            });
        });
    } else if a.from_step == b.from_step {
        of_one_pitch(&a, &b, number, &mut give);
    } else if a.count <= b.count {
        rows_of(&a).for_each(|row| compose(&row, &b, number, &mut give));
    } else {
        rows_of(&b).for_each(|row| compose(&a, &row, number, &mut give));
    }
}

fn rows_of(g: &Gather) -> impl Iterator<Item = Gather> + '_ {
    (0..g.count).map(|i| {
        let row = g.rows(i, 1);
        Gather::contiguous(row.source, row.from, row.at, row.run)
    })
}

/// Rows of one pitch: row `i` of `a` meets row `i - k` of `b` for at most two values of `k`, because no run is
/// longer than the pitch. Signed, in 128 bits, since `b` may begin before `a`.
fn of_one_pitch(a: &Gather, b: &Gather, number: u32, take: &mut dyn FnMut(Gather)) {
    let wide = |n: u64| i128::from(n);
    let pitch = wide(a.from_step);
    let delta = wide(b.from) - wide(a.from);
    let base = delta.div_euclid(pitch);
    for k in [base, base + 1] {
        // Where b's run begins, counted from the first byte of a's run beside it.
        let d = delta - k * pitch;
        let (lo, hi) = (d.max(0), (d + wide(b.run)).min(wide(a.run)));
        let (first, last) = (k.max(0), (wide(b.count) + k).min(wide(a.count)));
        if lo >= hi || first >= last {
            continue;
        }
        let from = wide(a.at) + first * wide(a.at_step) + lo;
        let at = wide(b.at) + (first - k) * wide(b.at_step) + lo - d;
        let narrow = |n: i128| u64::try_from(n).unwrap_or(0);
        take(Gather {
            source: number,
            from: narrow(from),
            at: narrow(at),
            run: narrow(hi - lo),
            count: narrow(last - first),
            from_step: a.at_step,
            at_step: b.at_step,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{any_gather, bytes_of};
    use super::*;
    use proptest::prelude::*;

    fn check(a: &Gather, b: &Gather) {
        let mut found = Vec::new();
        compose(a, b, 7, &mut |g| found.push(g));
        let (from, to) = (bytes_of(&[*a]), bytes_of(&[*b]));
        let mut wanted = Vec::new();
        for (_, source, at) in &from {
            wanted.extend(to.iter().filter(|(_, s, _)| s == source).map(|(_, _, to)| (7, *at, *to)));
        }
        wanted.sort_unstable();
        assert_eq!(bytes_of(&found), wanted, "{a:?} {b:?}");
    }

    proptest! {
        #[test]
        fn any_two_gathers_share_exactly_what_they_share(a in any_gather(), b in any_gather()) {
            check(&a, &b);
        }

        #[test]
        fn of_one_pitch_too(
            a in any_gather(), b in any_gather(), more in 0u64..4,
        ) {
            let pitch = a.run.max(b.run) + more;
            check(&Gather { from_step: pitch, ..a }, &Gather { from_step: pitch, ..b });
        }
    }
}
