//! From sizes, chunks and numbers of clones to stages.

use flashboot::{
    bench::{Shape, Stage},
    config::Chunk,
};
use flashboot_core::{
    BLOCK, ByteSize,
    schedule::{ChunkCosts, auto_chunk},
};
use std::{fmt, str::FromStr};

/// Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sizes(pub(super) Vec<u64>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = |text: &str| match text.trim().parse::<ByteSize>() {
            Ok(ByteSize(0)) => Err("0 bytes are nothing to measure".to_owned()),
            Ok(ByteSize(bytes)) => Ok(bytes),
            Err(e) => Err(e.to_string()),
        };
        if let Some((from, to)) = text.split_once("..") {
            let (from, to) = (size(from)?, size(to)?);
            if from > to {
                return Err(format!("`{text}` begins above its end"));
            }
            let doubled = std::iter::successors(Some(from), |last| last.checked_mul(2));
            return Ok(Self(doubled.take_while(|bytes| *bytes <= to).collect()));
        }
        text.split(',').map(size).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.0.iter().map(|bytes| ByteSize(*bytes).to_string()).collect();
        f.write_str(&all.join(","))
    }
}

/// Makes stages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shapes {
    /// GPUs that ranks go around; 0: host memory.
    pub(super) gpus: usize,
    pub(super) repeats: u32,
}

impl Shapes {
    fn costs(self) -> ChunkCosts {
        match self.gpus {
            0 => ChunkCosts::HOST,
            1 => ChunkCosts::SAME_GPU,
            _ => ChunkCosts::NVLINK,
        }
    }

    fn stage(self, shape: Shape, bytes: u64, chunk: Chunk, verify: bool) -> Stage {
        let schedule = shape.schedule();
        let shard = bytes / u64::from(schedule.shards());
        let chunk = match chunk {
            Chunk::Bytes(size) => size.0,
            Chunk::Auto => auto_chunk(shard, schedule.depth(), verify, BLOCK, self.costs()),
        };
        Stage { shape, bytes, chunk, verify, repeats: self.repeats, limits: false }
    }

    fn with_limits(self, stage: Stage) -> Stage {
        Stage { limits: self.gpus > 0, ..stage }
    }

    pub(super) fn copy(self, sizes: &Sizes, chunk: Chunk) -> Vec<Stage> {
        let one = |bytes: &u64| {
            let row = |verify| self.with_limits(self.stage(Shape::Star { clones: 1 }, *bytes, chunk, verify));
            [row(false), row(true)]
        };
        sizes.0.iter().flat_map(one).collect()
    }

    pub(super) fn chunks(
        self,
        bytes: u64,
        chunks: &Sizes,
        topology: &str,
        clones: u32,
        verify: bool,
    ) -> Vec<Stage> {
        let shape = if topology == "star" { Shape::Star { clones } } else { Shape::Chain { clones } };
        let one =
            |chunk: &u64| self.with_limits(self.stage(shape, bytes, Chunk::Bytes(ByteSize(*chunk)), verify));
        chunks.0.iter().map(one).collect()
    }

    pub(super) fn topologies(self, bytes: u64, clones: &[u32], chunk: Chunk, verify: bool) -> Vec<Stage> {
        let both = |clones: &u32| {
            let clones = *clones;
            [Shape::Star { clones }, Shape::Chain { clones }]
                .map(|shape| self.with_limits(self.stage(shape, bytes, chunk, verify)))
        };
        clones.iter().flat_map(both).collect()
    }

    pub(super) fn gather(self, sizes: &Sizes, nodes: u32, chunk: Chunk) -> Vec<Stage> {
        let one = |bytes: &u64| {
            let row = |verify| self.with_limits(self.stage(Shape::Ring { nodes }, *bytes, chunk, verify));
            [row(false), row(true)]
        };
        sizes.0.iter().flat_map(one).collect()
    }

    pub(super) fn setup(self, sizes: &Sizes) -> Vec<Stage> {
        sizes.0.iter().map(|bytes| self.stage(Shape::Import, *bytes, Chunk::Auto, false)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_or_are_listed() {
        let sizes = |text: &str| text.parse::<Sizes>().map(|sizes| sizes.0);
        assert_eq!(sizes("1MiB..5MiB"), Ok(vec![1 << 20, 2 << 20, 4 << 20]));
        assert_eq!(sizes("1MiB,3MiB"), Ok(vec![1 << 20, 3 << 20]));
        for wrong in ["", "0", "2MiB..1MiB", "1MiB..", "x", "1MiB,,2MiB"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
        assert_eq!("1MiB..4MiB".parse::<Sizes>().unwrap().to_string(), "1MiB,2MiB,4MiB");
    }

    #[test]
    fn every_copy_has_its_verified_row() {
        let shapes = Shapes { gpus: 2, repeats: 3 };
        let stages = shapes.copy(&Sizes(vec![1 << 20, 1 << 33]), Chunk::Auto);
        let rows: Vec<_> = stages.iter().map(|s| (s.bytes, s.chunk, s.verify, s.limits)).collect();
        let (small, large, chunk) = (1 << 20, 1 << 33, 2 << 30);
        assert_eq!(
            rows,
            [
                (small, BLOCK, false, true),
                (small, BLOCK, true, true),
                (large, chunk, false, true),
                (large, 256 << 20, true, true)
            ]
        );
        let host = Shapes { gpus: 0, repeats: 1 }.topologies(1 << 30, &[2], Chunk::Auto, true);
        assert!(host.iter().all(|stage| !stage.limits), "there is no GPU to ask");
    }
}
