//! Where each tensor of a rank image lies: `[ experts | non-experts ]`, image format 1.
//!
//! Experts come first, layer by layer (then the stages of a draft or multi-token head), each layer's experts by
//! number, so that one layer's experts, and one expert, are one contiguous span. Non-experts follow at the
//! *separator* in natural name order. Each tensor begins at a multiple of [`TENSOR_ALIGN`]; the payload ends at
//! a multiple of [`PAYLOAD_ALIGN`].

use std::cmp::Ordering;

/// Every tensor begins at a multiple of this: torch's own allocation unit, so kernels choose as they would
/// without us.
pub const TENSOR_ALIGN: u64 = 512;

/// The payload's length is a multiple of this, so that it can be read and written with direct IO.
pub const PAYLOAD_ALIGN: u64 = 4096;

/// Which half of the payload a tensor belongs to, and its place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// Part of one routed expert, or a fused tensor of all experts of one layer.
    Expert {
        /// Layers of the model come before stages of its draft.
        group: ExpertGroup,
        /// The layer's or stage's number.
        layer: u64,
        /// The expert's number; `None` for a tensor that holds every expert of its layer.
        expert: Option<u64>,
    },
    /// Everything else.
    NonExpert,
}

/// What an expert's layer number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertGroup {
    /// Layers of the model.
    Layer,
    /// Stages of a multi-token-prediction head.
    Stage,
}

/// One tensor to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Spec<'a> {
    /// Its name; unique among those placed together.
    pub name: &'a str,
    /// Its size.
    pub bytes: u64,
    /// Where it belongs.
    pub place: Place,
}

/// A placement: where every spec lies. Indices are those of the specs given to [`Layout::new`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    order: Vec<u32>,
    offsets: Vec<u64>,
    separator: u64,
    payload: u64,
}

/// Why tensors cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The end of a tensor is past u64.
    #[error("tensor `{tensor}` of {bytes} bytes at offset {offset} ends past 64 bits")]
    TooLarge {
        /// Its name.
        tensor: String,
        /// Its size.
        bytes: u64,
        /// Where it would begin.
        offset: u64,
    },
    /// More than `u32::MAX` tensors.
    #[error("{0} tensors: at most {max} can be placed", max = u32::MAX)]
    TooMany(usize),
}

impl Layout {
    /// Places every spec.
    pub fn new<'a>(count: usize, spec: impl Fn(usize) -> Spec<'a>) -> Result<Self, LayoutError> {
        let count32 = u32::try_from(count).map_err(|_| LayoutError::TooMany(count))?;
        let mut order: Vec<u32> = (0..count32).collect();
        let at = |i: u32| spec(i as usize);
        order.sort_unstable_by(|&a, &b| {
            let (a, b) = (at(a), at(b));
            a.place.cmp(&b.place).then_with(|| natural_order(a.name, b.name))
        });
        Self::place(order, &spec)
    }

    /// Places specs that are in the payload's order already, as those of one rank are when all ranks' were sorted
    /// together.
    pub fn in_order<'a>(count: usize, spec: impl Fn(usize) -> Spec<'a>) -> Result<Self, LayoutError> {
        let count32 = u32::try_from(count).map_err(|_| LayoutError::TooMany(count))?;
        Self::place((0..count32).collect(), &spec)
    }

    fn place<'a>(order: Vec<u32>, spec: &impl Fn(usize) -> Spec<'a>) -> Result<Self, LayoutError> {
        let at = |i: u32| spec(i as usize);
        let mut offsets = vec![0; order.len()];
        let (mut end, mut separator) = (0u64, None);
        for &index in &order {
            let Spec { name, bytes, place } = at(index);
            let too_large = |offset| LayoutError::TooLarge { tensor: name.to_owned(), bytes, offset };
            let start = align_up(end, TENSOR_ALIGN).ok_or_else(|| too_large(end))?;
            if place == Place::NonExpert && separator.is_none() {
                separator = Some(start);
            }
            end = start.checked_add(bytes).ok_or_else(|| too_large(start))?;
            // The padded end must exist too.
            align_up(end, PAYLOAD_ALIGN).ok_or_else(|| too_large(start))?;
            if let Some(slot) = offsets.get_mut(index as usize) {
                *slot = start;
            }
        }
        let payload = align_up(end, PAYLOAD_ALIGN).unwrap_or(end);
        // Without non-experts the separator is the aligned end of the experts.
        let separator = separator.or_else(|| align_up(end, TENSOR_ALIGN)).unwrap_or(payload);
        Ok(Self { order, offsets, separator, payload })
    }

    /// The specs' indices in payload order.
    pub fn order(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.order.iter().map(|&i| i as usize)
    }

    /// The spec whose place in the payload is `position`; `None` past the last.
    pub fn at(&self, position: usize) -> Option<usize> {
        self.order.get(position).map(|&i| i as usize)
    }

    /// Where spec `index` begins; `None` past the last.
    pub fn offset(&self, index: usize) -> Option<u64> {
        self.offsets.get(index).copied()
    }

    /// Where the non-experts begin: the expert bytes, padded.
    pub fn separator(&self) -> u64 {
        self.separator
    }

    /// Bytes of the payload, padding included.
    pub fn payload(&self) -> u64 {
        self.payload
    }
}

/// `value` rounded up to a multiple of `align` (a power of two), unless that is past u64.
pub fn align_up(value: u64, align: u64) -> Option<u64> {
    value.checked_add(align.checked_sub(1)?).map(|v| v & !(align - 1))
}

/// Orders names as people count: runs of digits by value (`layer.2` before `layer.10`), the rest by bytes.
/// Total: names that differ only in leading zeros are ordered by their bytes.
pub fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut x, mut y) = (a.as_bytes(), b.as_bytes());
    loop {
        match (x.split_first(), y.split_first()) {
            (None, None) => return a.cmp(b),
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some((p, rest_x)), Some((q, rest_y))) => {
                if p.is_ascii_digit() && q.is_ascii_digit() {
                    let (number_x, after_x) = split_number(x);
                    let (number_y, after_y) = split_number(y);
                    let by_value = number_x.len().cmp(&number_y.len()).then_with(|| number_x.cmp(number_y));
                    if by_value != Ordering::Equal {
                        return by_value;
                    }
                    (x, y) = (after_x, after_y);
                } else if p != q {
                    return p.cmp(q);
                } else {
                    (x, y) = (rest_x, rest_y);
                }
            }
        }
    }
}

/// The leading digits without leading zeros, and what follows them.
fn split_number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|c| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, after) = text.split_at(end);
    let zeros = digits.iter().position(|&c| c != b'0').unwrap_or(digits.len());
    (digits.get(zeros..).unwrap_or_default(), after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place() -> impl Strategy<Value = Place> {
        prop_oneof![
            Just(Place::NonExpert),
            (any::<bool>(), 0u64..4, prop::option::of(0u64..4)).prop_map(|(stage, layer, expert)| {
                let group = if stage { ExpertGroup::Stage } else { ExpertGroup::Layer };
                Place::Expert { group, layer, expert }
            }),
        ]
    }

    proptest! {
        #[test]
        fn every_tensor_is_placed_once_aligned_and_apart(
            given in prop::collection::vec((place(), 0u64..5000), 0..60),
        ) {
            let names: Vec<String> = (0..given.len()).map(|i| format!("t.{i}")).collect();
            let spec = |i: usize| Spec { name: &names[i], bytes: given[i].1, place: given[i].0 };
            let layout = Layout::new(given.len(), spec).unwrap();
            let order: Vec<usize> = layout.order().collect();
            let mut seen = order.clone();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..given.len()).collect::<Vec<_>>());
            let (mut end, mut last) = (0, None);
            for i in order {
                let offset = layout.offset(i).unwrap();
                prop_assert!(offset >= end && offset - end < TENSOR_ALIGN && offset.is_multiple_of(TENSOR_ALIGN));
                end = offset + given[i].1;
                if given[i].0 == Place::NonExpert {
                    prop_assert!(offset >= layout.separator());
                } else {
                    prop_assert!(end <= layout.separator());
                }
                prop_assert!(last <= Some(given[i].0));
                last = Some(given[i].0);
            }
            prop_assert!(layout.payload() >= end && layout.payload() - end < PAYLOAD_ALIGN);
            prop_assert_eq!(layout.payload() % PAYLOAD_ALIGN, 0);
            prop_assert!(layout.separator() <= layout.payload() && layout.separator().is_multiple_of(TENSOR_ALIGN));
        }

        #[test]
        fn no_sizes_overflow(sizes in prop::collection::vec(any::<u64>(), 0..6)) {
            let spec = |i: usize| Spec { name: "x", bytes: sizes[i], place: Place::NonExpert };
            if let Ok(layout) = Layout::new(sizes.len(), spec) {
                prop_assert!(sizes.iter().all(|&s| s <= layout.payload()));
            }
        }

        #[test]
        fn natural_order_is_total(mut names in prop::collection::vec("[a.0-3]{0,6}", 0..20)) {
            names.sort_by(|a, b| natural_order(a, b));
            for pair in names.windows(2) {
                prop_assert_ne!(natural_order(&pair[0], &pair[1]), Ordering::Greater);
                prop_assert_eq!(natural_order(&pair[0], &pair[1]) == Ordering::Equal, pair[0] == pair[1]);
            }
        }
    }

    #[test]
    fn layers_count_as_people_do() {
        assert_eq!(natural_order("layers.2.w", "layers.10.w"), Ordering::Less);
        assert_eq!(natural_order("layers.02", "layers.2"), Ordering::Less);
        assert_eq!(natural_order("a", "a.1"), Ordering::Less);
    }

    #[test]
    fn a_tensor_that_ends_past_64_bits_is_named() {
        let sizes = [8, u64::MAX - 600];
        let spec = |i: usize| Spec { name: ["a", "b"][i], bytes: sizes[i], place: Place::NonExpert };
        assert_eq!(
            Layout::new(2, spec),
            Err(LayoutError::TooLarge { tensor: "b".into(), bytes: u64::MAX - 600, offset: 512 })
        );
    }

    #[test]
    fn the_separator_of_experts_alone_is_their_padded_end() {
        let place = Place::Expert { group: ExpertGroup::Layer, layer: 0, expert: None };
        let layout = Layout::new(1, |_| Spec { name: "e", bytes: 700, place }).unwrap();
        assert_eq!((layout.separator(), layout.payload()), (1024, 4096));
        let none = Layout::new(0, |_| Spec { name: "", bytes: 0, place }).unwrap();
        assert_eq!((none.separator(), none.payload()), (0, 0));
    }
}
