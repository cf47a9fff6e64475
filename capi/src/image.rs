//! `fb_image`: a packed model on disk.

use crate::{
    edge, handle,
    status::{c_text, fb_status, guard, guarded, invalid},
};
use flashboot_checkpoint::{self as checkpoint, RankImage, VerifyOptions};
use flashboot_core::{Error, Kind, Result};
use std::ffi::{CString, c_char};

/// An image that was opened. A handle: nothing may be read through it.
pub struct fb_image {
    _private: [u8; 0],
}

/// What the handle is of.
pub(crate) struct Image {
    pub(crate) inner: checkpoint::Image,
    id: CString,
    ranks: Vec<CString>,
}

impl Image {
    /// The rank image called so, or the only one.
    pub(crate) fn rank(&self, op: &'static str, name: Option<&str>) -> Result<&RankImage> {
        let ranks = self.inner.ranks();
        let found = match (name, ranks) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), all) => all.iter().find(|rank| rank.coordinate.to_string() == name),
        };
        found.ok_or_else(|| {
            let wanted =
                name.map_or_else(|| "one of several ranks is to be named".into(), |n| format!("no rank {n}"));
            let names: Vec<_> = ranks.iter().take(16).map(|rank| rank.coordinate.to_string()).collect();
            invalid(op, format!("{}: {wanted}: {}", self.inner.dir().display(), names.join(", ")))
        })
    }
}

/// Opens the image in the directory `path`; its metadata and tables are checked.
///
/// # Safety
/// `path` is text, `image` points to a handle of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_image_open(path: *const c_char, image: *mut *mut fb_image) -> fb_status {
    guard(|| {
        let out = edge::out("image", image)?;
        // SAFETY: the caller's promise.
        let path = unsafe { edge::path(path) }.ok_or_else(|| invalid("path", "it is null"))?;
        let inner = checkpoint::Image::open(&path)?;
        let ranks = inner.ranks().iter().map(|rank| c_text(&rank.coordinate.to_string())).collect();
        let opened = handle::give(Image { id: c_text(inner.id()), ranks, inner });
        // SAFETY: the caller's promise.
        unsafe { out.put(opened) };
        Ok(())
    })
}

/// Reads every payload and compares every block with its digest: `FB_CORRUPT` where one does not match.
#[unsafe(no_mangle)]
pub extern "C" fn fb_image_verify(image: *const fb_image) -> fb_status {
    guard(|| {
        let image = handle::find::<Image>("verify", image)?;
        let report = checkpoint::verify(&image.inner, &VerifyOptions::default(), &())?;
        let Some(block) = report.bad_blocks.first() else { return Ok(()) };
        let detail =
            format!("{}: {} blocks do not match", image.inner.dir().display(), report.bad_blocks.len());
        Err(Error::new(Kind::Corrupt, "verify", detail)
            .with_chunk(*block)
            .with_remedy("pack or fetch the image again"))
    })
}

/// The image's id, 64 hexadecimal digits that cover every byte, offset and name; NULL for no image. It stays until the image is
/// released.
#[unsafe(no_mangle)]
pub extern "C" fn fb_image_id(image: *const fb_image) -> *const c_char {
    guarded(std::ptr::null(), || Ok(handle::find::<Image>("id", image)?.id.as_ptr()))
}

/// How many rank images it has; 0 for no image.
#[unsafe(no_mangle)]
pub extern "C" fn fb_image_ranks(image: *const fb_image) -> usize {
    guarded(0, || Ok(handle::find::<Image>("ranks", image)?.ranks.len()))
}

/// The name of a rank image; NULL past the last. It stays until the image is released.
#[unsafe(no_mangle)]
pub extern "C" fn fb_image_rank(image: *const fb_image, index: usize) -> *const c_char {
    guarded(std::ptr::null(), || {
        let image = handle::find::<Image>("rank", image)?;
        let name = image.ranks.get(index).map(|name| name.as_ptr());
        name.ok_or_else(|| invalid("rank", format!("rank {index} of {}", image.ranks.len())))
    })
}

/// Releases the image. What was loaded from it stays.
#[unsafe(no_mangle)]
pub extern "C" fn fb_image_release(image: *mut fb_image) -> fb_status {
    guard(|| handle::take::<Image>("release", image).map(drop))
}
