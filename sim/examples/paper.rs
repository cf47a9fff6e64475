//! x
use flashboot_sim::{Profile, paper};
fn main() {
    let p = Profile::built_in("gb300").unwrap();
    println!("{}", paper::page(&p).unwrap());
    if std::env::args().any(|a| a == "--fit") { println!("{:?}", paper::Fit::find(&p)); }
}
