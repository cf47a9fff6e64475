//! x
use crate::*;
/// x
pub fn page(p: &Profile) -> Result<String, Error> {
    let mut out = String::new();
    for t in super::tables(p)? {
        out += &format!("\n{}\n{}\n", t.title, t.note);
        for r in t.rows {
            out += &format!("{:12} {:60} {:?} {:.2} {} {:+.2}% {} {:?}\n", r.figure, r.what, r.wanted, r.simulated, r.unit, r.error()*100.0, r.basis.name(), r.met());
        }
    }
    Ok(out)
}
