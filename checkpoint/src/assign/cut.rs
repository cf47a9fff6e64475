//! From features to bytes: which part of a dimension a rank takes, and the gathers that this makes.

use crate::gather::Gather;
use crate::quant::Axis;
use crate::recipe::HeadOrder;
use flashboot_core::Dtype;

/// A part of one dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) dim: usize,
    /// Half-open, in the order in which they follow each other afterwards.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// The dimension afterwards: the ranges' sum, or more where the target pads.
    pub(crate) extent: u64,
}

/// Why a dimension cannot be cut: what it is, and what it would have to be a multiple of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Indivisible {
    pub(crate) size: u64,
    pub(crate) by: u64,
}

/// How features are shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// Evenly.
    Even,
    /// Whole heads; each goes to several ranks where there are more ranks than heads.
    Heads(u64),
    /// Equal parts one after the other, each evenly.
    Parts(u64),
    /// Queries, keys and values.
    Qkv { heads: u64, kv_heads: u64, order: HeadOrder },
    /// As torch chunks: the last ones shorter, or empty.
    Chunks,
    /// As chunks of a dimension padded to a multiple, the padding kept.
    Padded(u64),
}

/// The features of part `k` of `n`, and how many it has with padding.
pub(crate) fn features(
    share: Share,
    size: u64,
    k: u64,
    n: u64,
) -> Result<(Vec<(u64, u64)>, u64), Indivisible> {
    let sum = |ranges: Vec<(u64, u64)>| {
        let total = ranges.iter().map(|(start, end)| end - start).sum();
        (ranges, total)
    };
    match share {
        Share::Even => even(size, k, n).map(|r| sum(vec![r])),
        Share::Heads(heads) => {
            let head = exactly(size, heads)?;
            let (first, end) = whole_heads(heads, k, n)?;
            Ok(sum(vec![(first * head, end * head)]))
        }
        Share::Parts(parts) => {
            let part = exactly(size, parts)?;
            let (start, end) = even(part, k, n)?;
            Ok(sum((0..parts).map(|p| (p * part + start, p * part + end)).collect()))
        }
        Share::Qkv { heads, kv_heads, order } => {
            exactly(heads, kv_heads)?;
            // Past 64 bits there are no so many heads, and no sum of theirs below could be trusted.
            let all = kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(heads));
            let head = exactly(size, all.ok_or(Indivisible { size, by: heads })?)?;
            let (q0, q1) = whole_heads(heads, k, n)?;
            let (k0, k1) = whole_heads(kv_heads, k, n)?;
            let group = heads / kv_heads;
            let ranges = match order {
                HeadOrder::Blocks => {
                    vec![(q0, q1), (heads + k0, heads + k1), (heads + kv_heads + k0, heads + kv_heads + k1)]
                }
                // Whole groups, or the rank's queries of one group with its key and value.
                HeadOrder::Groups if n <= kv_heads => vec![(k0 * (group + 2), k1 * (group + 2))],
                HeadOrder::Groups => {
                    let start = k0 * (group + 2);
                    let q = q0 - k0 * group;
                    vec![(start + q, start + q + q1 - q0), (start + group, start + group + 2)]
                }
            };
            Ok(sum(ranges.into_iter().map(|(a, b)| (a * head, b * head)).collect()))
        }
        Share::Chunks => Ok(sum(vec![chunk(size, k, n)])),
        Share::Padded(multiple) => {
            let padded = size.div_ceil(multiple).saturating_mul(multiple);
            let part = exactly(padded, n)?;
            let start = (k * part).min(size);
            Ok((vec![(start, (start + part).min(size))], part))
        }
    }
}

fn exactly(size: u64, by: u64) -> Result<u64, Indivisible> {
    if by == 0 || !size.is_multiple_of(by) {
        return Err(Indivisible { size, by });
    }
    Ok(size / by)
}

fn even(size: u64, k: u64, n: u64) -> Result<(u64, u64), Indivisible> {
    let part = exactly(size, n)?;
    Ok((k * part, (k + 1) * part))
}

fn whole_heads(heads: u64, k: u64, n: u64) -> Result<(u64, u64), Indivisible> {
    if heads >= n {
        return even(heads, k, n);
    }
    let sharing = exactly(n, heads)?;
    Ok((k / sharing, k / sharing + 1))
}

fn chunk(size: u64, k: u64, n: u64) -> (u64, u64) {
    let part = size.div_ceil(n.max(1));
    (k.saturating_mul(part).min(size), (k + 1).saturating_mul(part).min(size))
}

/// The cut of a parameter whose features `ranges` are taken along `axis`.
pub(crate) fn along(axis: Axis, ranges: &[(u64, u64)], extent: u64, size: u64) -> Result<Cut, Indivisible> {
    let Axis { dim, unit, exact } = axis;
    let mut cut = Vec::with_capacity(ranges.len());
    for &(start, end) in ranges {
        let whole = start.is_multiple_of(unit) && (end.is_multiple_of(unit) || end == size);
        // A shared scale belongs to both sides of a cut; between parts of one rank it would be there twice.
        if !whole && (exact || ranges.len() > 1) {
            return Err(Indivisible { size: end - start, by: unit });
        }
        let range =
            if start == end { (start / unit, start / unit) } else { (start / unit, end.div_ceil(unit)) };
        cut.push(range);
    }
    let taken: u64 = cut.iter().map(|(start, end)| end - start).sum();
    let padded = ranges.iter().map(|(start, end)| end - start).sum::<u64>() < extent;
    Ok(Cut { dim, ranges: cut, extent: if padded { extent.div_ceil(unit) } else { taken } })
}

/// A rank's part of a tensor: its shape, and the gathers (of source 0) that fill it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
    pub(crate) gathers: Vec<Gather>,
}

/// The part of a tensor that `cut` and the runs `lead` of its first dimension leave. `None` where elements narrower
/// than a byte would be cut inside one.
pub(crate) fn part(
    shape: &[u64],
    dtype: Dtype,
    lead: Option<&[(u64, u64)]>,
    cut: Option<&Cut>,
) -> Option<Part> {
    let mut new = shape.to_vec();
    let (dim, ranges) = match (cut, lead) {
        (None, None) => {
            let bytes = dtype.bytes_of(shape).ok()?;
            return Some(Part { shape: new, bytes, gathers: vec![Gather::contiguous(0, 0, 0, bytes)] });
        }
        (None, Some(lead)) => (0, lead),
        (Some(cut), _) => (cut.dim, cut.ranges.as_slice()),
    };
    let extent = cut.map_or_else(|| ranges.iter().map(|(a, b)| b - a).sum(), |cut| cut.extent);
    *new.get_mut(dim)? = extent;
    // Rows above the cut dimension: those of the first dimension's runs, or all.
    let product = |dims: &[u64]| dims.iter().fold(1u64, |n, d| n.saturating_mul(*d));
    let rows: Vec<(u64, u64)> = match lead {
        Some(lead) if cut.is_some() => {
            *new.first_mut()? = lead.iter().map(|(a, b)| b - a).sum();
            let each = product(shape.get(1..dim)?);
            lead.iter().map(|(a, b)| (a * each, b * each)).collect()
        }
        _ => vec![(0, product(shape.get(..dim)?))],
    };
    let bits = product(shape.get(dim + 1..)?).saturating_mul(dtype.bits());
    let bytes = |elements: u64| {
        let all = elements.checked_mul(bits)?;
        all.is_multiple_of(8).then_some(all / 8)
    };
    let pitch = bytes(*shape.get(dim)?)?;
    let new_pitch = bytes(extent)?;
    let (mut gathers, mut row_at) = (Vec::new(), 0u64);
    for (first, end) in rows {
        let mut column_at = 0u64;
        for &(start, stop) in ranges {
            let run = bytes(stop.saturating_sub(start))?;
            let gather = Gather {
                source: 0,
                from: first.checked_mul(pitch)?.checked_add(bytes(start)?)?,
                at: row_at.checked_mul(new_pitch)?.checked_add(column_at)?,
                run,
                count: end - first,
                from_step: pitch,
                at_step: new_pitch,
            };
            if gather.bytes() > 0 {
                gathers.push(gather.normal());
            }
            column_at = column_at.checked_add(run)?;
        }
        row_at = row_at.checked_add(end - first)?;
    }
    let bytes = dtype.bytes_of(&new).ok()?;
    Some(Part { shape: new, bytes, gathers })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather::tests::bytes_of;
    use proptest::prelude::*;

    fn all(share: Share, size: u64, n: u64) -> Vec<Vec<(u64, u64)>> {
        (0..n).map(|k| features(share, size, k, n).unwrap().0).collect()
    }

    #[test]
    fn heads_are_whole_and_shared_where_there_are_fewer_than_ranks() {
        assert_eq!(all(Share::Heads(4), 16, 2), [[(0, 8)], [(8, 16)]]);
        assert_eq!(all(Share::Heads(2), 16, 4), [[(0, 8)], [(0, 8)], [(8, 16)], [(8, 16)]]);
        assert_eq!(features(Share::Heads(3), 12, 0, 4), Err(Indivisible { size: 4, by: 3 }));
        assert_eq!(features(Share::Heads(6), 12, 0, 4), Err(Indivisible { size: 6, by: 4 }));
    }

    #[test]
    fn fused_heads_take_their_queries_key_and_value() {
        let blocks = Share::Qkv { heads: 4, kv_heads: 2, order: HeadOrder::Blocks };
        // q0 q1 q2 q3 k0 k1 v0 v1, one feature each.
        assert_eq!(all(blocks, 8, 2), [[(0, 2), (4, 5), (6, 7)], [(2, 4), (5, 6), (7, 8)]]);
        assert_eq!(all(blocks, 8, 4).get(1), Some(&vec![(1, 2), (4, 5), (6, 7)]), "a key for two ranks");
        let groups = Share::Qkv { heads: 4, kv_heads: 2, order: HeadOrder::Groups };
        // q0 q1 k0 v0 | q2 q3 k1 v1
        assert_eq!(all(groups, 8, 2), [[(0, 4)], [(4, 8)]]);
        assert_eq!(all(groups, 8, 4).get(3), Some(&vec![(5, 6), (6, 8)]));
    }

    #[test]
    fn numbers_near_the_end_of_64_bits_are_refused_or_come_to_nothing() {
        // Tensors without elements may have any dimension, and config.json any number of heads.
        let qkv = |heads, kv_heads| Share::Qkv { heads, kv_heads, order: HeadOrder::Blocks };
        assert!(features(qkv(u64::MAX - 1, u64::MAX >> 1), 0, 1, 2).is_err());
        assert!(features(qkv(1 << 62, 1 << 61), 0, 1, 2).unwrap().0.iter().all(|(a, b)| a == b));
        assert_eq!(features(Share::Chunks, u64::MAX, 1, 2), Ok((vec![(1 << 63, u64::MAX)], (1 << 63) - 1)));
        assert_eq!(features(Share::Chunks, u64::MAX, 65_535, 65_536).unwrap().0.len(), 1);
    }

    #[test]
    fn chunks_are_torchs_and_padding_is_kept() {
        assert_eq!(all(Share::Chunks, 5, 4), [[(0, 2)], [(2, 4)], [(4, 5)], [(5, 5)]]);
        assert_eq!(features(Share::Padded(64), 100, 1, 2), Ok((vec![(64, 100)], 64)));
        assert_eq!(features(Share::Padded(64), 10, 1, 2), Ok((vec![(10, 10)], 32)));
        assert_eq!(all(Share::Parts(2), 8, 2), [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]);
    }

    #[test]
    fn a_block_that_a_cut_goes_through_is_on_both_sides() {
        let axis = Axis { dim: 0, unit: 128, exact: false };
        assert_eq!(along(axis, &[(0, 96)], 96, 192).unwrap().ranges, [(0, 1)]);
        assert_eq!(along(axis, &[(96, 192)], 96, 192).unwrap().ranges, [(0, 2)]);
        assert!(along(Axis { exact: true, ..axis }, &[(0, 96)], 96, 192).is_err());
        assert!(along(axis, &[(0, 96), (192, 288)], 192, 384).is_err());
    }

    proptest! {
        /// Against the definition: element by element.
        #[test]
        fn a_part_is_exactly_the_elements_it_names(
            shape in prop::collection::vec(1u64..5, 1..5), dim in 0usize..4, lead in any::<bool>(), seed in 0u64..1000,
        ) {
            let dim = dim % shape.len();
            let pick = |n: u64, s: u64| { let a = s % (n + 1); (a.min(n - a), a.max(n - a)) };
            let cut = Cut { dim, ranges: vec![pick(shape[dim], seed)], extent: 0 };
            let cut = Cut { extent: cut.ranges[0].1 - cut.ranges[0].0, ..cut };
            let lead = (lead && dim > 0).then(|| vec![pick(shape[0], seed / 7)]);
            let found = part(&shape, Dtype::F16, lead.as_deref(), Some(&cut)).unwrap();
            let mut wanted = Vec::new();
            let total: u64 = shape.iter().product();
            let mut at = 0;
            for element in 0..total {
                let mut rest = element;
                let mut index = vec![0; shape.len()];
                for (i, n) in shape.iter().enumerate().rev() {
                    index[i] = rest % n;
                    rest /= n;
                }
                let inside = |i: usize, r: &(u64, u64)| index[i] >= r.0 && index[i] < r.1;
                if inside(dim, &cut.ranges[0]) && lead.as_ref().is_none_or(|l| inside(0, &l[0])) {
                    wanted.push((0, element * 2, at));
                    wanted.push((0, element * 2 + 1, at + 1));
                    at += 2;
                }
            }
            prop_assert_eq!(bytes_of(&found.gathers), wanted);
            prop_assert_eq!(found.bytes, at);
        }
    }

    #[test]
    fn half_bytes_are_not_cut() {
        let cut = |end| Cut { dim: 1, ranges: vec![(0, end)], extent: end };
        assert!(part(&[3, 8], Dtype::F4, None, Some(&cut(3))).is_none());
        assert_eq!(part(&[3, 8], Dtype::F4, None, Some(&cut(4))).unwrap().bytes, 6);
    }
}
