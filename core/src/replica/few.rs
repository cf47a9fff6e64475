//! A map of few entries, in one piece of memory and in the order of its keys.
//!
//! A replica has one or two sources and two pulls in flight, and a simulation has thousands of replicas: what costs there is
//! memory that is not in the cache, so a tree's node of eleven entries for one of them is dear.

#[derive(Debug)]
pub(super) struct Few<K, V>(Vec<(K, V)>);

impl<K, V> Default for Few<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord + Copy, V> Few<K, V> {
    fn find(&self, key: &K) -> Result<usize, usize> {
        self.0.binary_search_by(|(k, _)| k.cmp(key))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn contains_key(&self, key: &K) -> bool {
        self.find(key).is_ok()
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        let at = self.find(key).ok()?;
        self.0.get(at).map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let at = self.find(key).ok()?;
        self.0.get_mut(at).map(|(_, value)| value)
    }

    /// Puts `value` in, in the place of what `key` had.
    pub(super) fn insert(&mut self, key: K, value: V) {
        match self.find(&key) {
            Ok(at) => {
                if let Some(entry) = self.0.get_mut(at) {
                    entry.1 = value;
                }
            }
            Err(at) => self.0.insert(at, (key, value)),
        }
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let at = self.find(key).ok()?;
        Some(self.0.remove(at).1)
    }

    pub(super) fn retain(&mut self, mut keeps: impl FnMut(&K, &V) -> bool) {
        self.0.retain(|(key, value)| keeps(key, value));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.0.iter().map(|(_, value)| value)
    }

    pub(super) fn into_iter(self) -> impl Iterator<Item = (K, V)> {
        self.0.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn it_does_what_a_tree_does(steps in prop::collection::vec((0u8..6, 0u8..4, any::<u16>()), 0..60)) {
            let (mut few, mut tree) = (Few::default(), BTreeMap::new());
            for (key, what, value) in steps {
                match what {
                    0 => prop_assert_eq!(few.remove(&key), tree.remove(&key)),
                    1 => {
                        few.retain(|k, v| u16::from(*k) + v % 2 != 3);
                        tree.retain(|k, v| u16::from(*k) + *v % 2 != 3);
                    }
                    _ => {
                        few.insert(key, value);
                        tree.insert(key, value);
                    }
                }
                prop_assert!(few.iter().eq(tree.iter()));
                prop_assert_eq!((few.get(&key), few.len(), few.is_empty()), (tree.get(&key), tree.len(), tree.is_empty()));
            }
        }
    }
}
