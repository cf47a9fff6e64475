//! Which devices are near which memory: by sysfs, the NUMA node and the PCI path.

use std::{fs, path::Path};

/// Where a device sits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Place {
    numa_node: Option<u32>,
    /// The folders from the host bridge down.
    path: Vec<String>,
}

impl Place {
    /// Of an RDMA device by name. A software device has none.
    pub(crate) fn of_device(name: &str) -> Self {
        Self::read(&Path::new("/sys/class/infiniband").join(name).join("device"))
    }

    /// Of a PCI device by address, as `0000:3b:00.0`.
    pub(crate) fn of_pci(address: &str) -> Self {
        Self::read(&Path::new("/sys/bus/pci/devices").join(address.to_ascii_lowercase()))
    }

    fn read(folder: &Path) -> Self {
        let node = fs::read_to_string(folder.join("numa_node")).ok();
        let path = fs::canonicalize(folder).unwrap_or_default();
        Self {
            // -1 where there is one node only.
            numa_node: node.and_then(|text| text.trim().parse().ok()),
            path: path.iter().map(|part| part.to_string_lossy().into_owned()).collect(),
        }
    }

    /// Folders that both are under: the more, the fewer bridges between them.
    fn shared(&self, other: &Self) -> usize {
        self.path.iter().zip(&other.path).take_while(|(a, b)| a == b).count()
    }
}

/// Sorts `devices` by nearness to a PCI device, then by NUMA node, then by name.
pub(crate) fn sort(devices: &mut [(String, Place)], pci: Option<&Place>, node: Option<u32>) {
    devices.sort_by_cached_key(|(name, place)| {
        let far = pci.map_or(0, |pci| usize::MAX - place.shared(pci));
        let other_node = node.is_some() && place.numa_node != node;
        (far, other_node, name.clone())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nic_under_the_same_bridge_comes_first_then_that_of_the_node() {
        let place =
            |path: &str, node| Place { numa_node: node, path: path.split('/').map(str::to_owned).collect() };
        let gpu = place("sys/pci0/a/b/gpu", Some(0));
        let mut devices = vec![
            ("mlx5_2".to_owned(), place("sys/pci1/c/d/nic", Some(1))),
            ("mlx5_1".to_owned(), place("sys/pci0/x/nic", Some(0))),
            ("mlx5_0".to_owned(), place("sys/pci0/a/b/nic", Some(0))),
        ];
        let names =
            |devices: &[(String, Place)]| devices.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        sort(&mut devices, Some(&gpu), None);
        assert_eq!(names(&devices), ["mlx5_0", "mlx5_1", "mlx5_2"]);
        sort(&mut devices, None, Some(1));
        assert_eq!(names(&devices), ["mlx5_2", "mlx5_0", "mlx5_1"]);
        assert_eq!(Place::of_device("no such device"), Place::default());
    }
}
