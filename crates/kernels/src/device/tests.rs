use super::processors;
use crate::{Cpu, Isa, ReferenceDevice};

#[test]
fn another_processor_than_the_cpu_is_named_beside_the_instruction_set() {
    let portable = Cpu::with_isa(1, Isa::Portable).unwrap();
    assert_eq!(processors(&portable), ("portable".to_owned(), None));
    let selected = Isa::selected().unwrap().to_string();
    assert_eq!(processors(&ReferenceDevice), (selected, Some("reference".to_owned())));
}
