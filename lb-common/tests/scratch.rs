//! The programs never hold two references to one field of `SCRATCH` (see `Scratch` in `lb-ebpf`): between a `let` that
//! borrows a field and the last use of the variables that it binds, a function neither borrows the field again nor
//! calls a function that borrows the field, directly or through other calls.
//!
//! The test reads the sources, because the programs run only in the kernel. It identifies a callee by its name, and by
//! the module or type that the call or an import names; it identifies a method by its name alone. The test misses:
//!
//! - calls by a name or path that differs from the definition (`pub use`), calls from code of another crate (such as
//!   `flow_table::make_room`), and macros,
//! - references that `if let`, `match` or a closure binds, that come from another variable, or that a function stores
//!   in a value.

#![expect(clippy::wildcard_enum_match_arm, reason = "most kinds of expressions hold no reference")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Block, Expr, ExprCall, ExprMethodCall, ExprPath, ImplItem, ItemFn, ItemImpl, ItemMacro, ItemUse, Local,
    Pat, PatIdent, Signature, Stmt, Type,
    visit::{self, Visit},
};

use self::{files::paths, imports_of::imports_of};

#[path = "support/files.rs"]
mod files;
#[path = "support/imports_of.rs"]
mod imports_of;

/// One thing that a function does. A function's steps are in the order in which its source names them.
#[derive(Debug)]
enum Step {
    /// Borrows this field.
    Borrow(String),
    /// Calls this function. The arguments include references of these origins.
    Call(Callee, Vec<Origin>),
    /// Uses this variable.
    Use(String),
    /// Binds these variables to references of these origins by a `let`.
    Bound(BTreeSet<String>, Vec<Origin>),
}

/// The function that a call names: by `name(…)`, `qualifier::name(…)` or `receiver.name(…)`.
#[derive(Clone, Debug)]
struct Callee {
    name: String,
    qualifier: Option<String>,
    is_method: bool,
}

/// The origin of a reference: a field of `SCRATCH`, or the result of a call.
#[derive(Clone, Debug)]
enum Origin {
    Field(String),
    Result(Callee),
}

#[derive(Debug)]
struct Function {
    name: String,
    file: PathBuf,
    /// Whether the function takes `self`.
    is_method: bool,
    /// The type that the function belongs to.
    of: Option<String>,
    steps: Vec<Step>,
    /// The origins of the references in the function's result.
    result: Vec<Origin>,
}

#[test]
fn programs_never_hold_two_references_to_a_field_of_scratch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("lb-ebpf").join("src");
    let fields = fields(&read(&root.join("datapath/scratch/mod.rs")));
    assert!(fields.contains("setup") && fields.len() > 10, "{fields:?}");
    let files = ["datapath", "sockets"].into_iter().flat_map(|folder| paths(&root.join(folder), ".rs"));
    let functions: Vec<Function> = files.flat_map(|file| functions(&read(&file), file, &fields)).collect();
    let borrows = functions.iter().flat_map(|it| &it.steps).filter(|it| matches!(it, Step::Borrow(_)));
    assert!(borrows.count() > 40, "the test no longer recognises borrows");
    let found = twice_borrowed(&functions);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn second_reference_to_a_field_is_found() {
    let fields = BTreeSet::from(["setup".to_owned(), "route".to_owned()]);
    let found = |text: &str| twice_borrowed(&functions(&parse(text), "it.rs".into(), &fields));
    let callees = "
        fn inner() { scratch().setup().port = 1; }
        fn outer() { inner() }
        fn setup_of() -> &'static mut Setup { scratch().setup() }";
    for body in [
        "let setup = scratch().setup(); let other = scratch.setup(); setup.port = 2;",
        "let setup = scratch()?.setup(); outer(); setup.port = 2;",
        "let (setup, route) = (scratch.setup(), scratch.route()); outer(); use_of(setup, route);",
        "let Setup { from, .. } = scratch.setup(); outer(); use_of(from);",
        "let from = &scratch.setup().from; outer(); use_of(from);",
        "let setup = setup_of(); outer(); setup.port = 2;",
        "let setup = scratch.setup(); outer(setup);",
        "outer(scratch.setup());",
    ] {
        assert_eq!(found(&format!("{callees} fn body() {{ {body} }}")).len(), 1, "{body}");
    }
    for body in [
        "outer(); let setup = scratch.setup(); setup.port = 2; outer();",
        "let port = scratch.setup().port; outer(); use_of(port);",
        "let Setup { from, .. } = *scratch.setup(); outer(); use_of(from);",
        "let route = scratch.route(); outer(); use_of(route);",
    ] {
        assert_eq!(found(&format!("{callees} fn body() {{ {body} }}")), [] as [String; 0], "{body}");
    }
}

fn read(path: &Path) -> syn::File {
    parse(&fs::read_to_string(path).expect("a source file"))
}

fn parse(text: &str) -> syn::File {
    syn::parse_file(text).expect("Rust")
}

/// The fields that the macro `fields!` of this file declares.
fn fields(file: &syn::File) -> BTreeSet<String> {
    struct Found(BTreeSet<String>);
    impl<'a> Visit<'a> for Found {
        fn visit_item_macro(&mut self, item: &'a ItemMacro) {
            if item.mac.path.is_ident("fields") {
                let text = item.mac.tokens.to_string();
                let names = text.split(" : ").filter_map(|part| part.split_whitespace().next_back());
                self.0.extend(
                    names.filter(|name| name.chars().all(|c| c.is_lowercase() || c == '_')).map(Into::into),
                );
            }
        }
    }
    let mut found = Found(BTreeSet::new());
    found.visit_file(file);
    found.0
}

/// Collects the functions of a file.
struct Reader<'a> {
    fields: &'a BTreeSet<String>,
    file: PathBuf,
    /// The paths of the names that the file imports.
    imports: BTreeMap<String, Vec<String>>,
    functions: Vec<Function>,
}

/// The functions of `source`, the parsed text of `file`.
fn functions(source: &syn::File, file: PathBuf, fields: &BTreeSet<String>) -> Vec<Function> {
    let mut reader = Reader { fields, file, imports: BTreeMap::new(), functions: Vec::new() };
    reader.visit_file(source);
    reader.functions
}

impl<'a> Visit<'a> for Reader<'_> {
    /// In our files, imports stand before functions.
    fn visit_item_use(&mut self, item: &'a ItemUse) {
        let names = imports_of(&item.tree).into_iter().filter_map(|(name, path)| Some((name?, path)));
        self.imports.extend(names);
    }

    fn visit_item_fn(&mut self, item: &'a ItemFn) {
        self.add(&item.sig, &item.block, None);
        visit::visit_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'a ItemImpl) {
        let Type::Path(of) = &*item.self_ty else { return };
        let of = of.path.segments.last().map(|it| it.ident.to_string());
        for function in &item.items {
            if let ImplItem::Fn(function) = function {
                self.add(&function.sig, &function.block, of.clone());
            }
        }
    }
}

impl Reader<'_> {
    fn add(&mut self, signature: &Signature, body: &Block, of: Option<String>) {
        let mut locals = Variables(BTreeSet::new());
        locals.visit_block(body);
        let Self { fields, ref imports, .. } = *self;
        let mut steps = Steps { fields, imports, locals: locals.0, steps: Vec::new() };
        steps.visit_block(body);
        let result = steps.of_block(body);
        self.functions.push(Function {
            name: signature.ident.to_string(),
            file: self.file.clone(),
            is_method: signature.receiver().is_some(),
            of,
            steps: steps.steps,
            result,
        });
    }
}

impl Function {
    /// Whether a call of `callee` in `file` may call this function. `is_in_file` is whether a function of that name is
    /// in `file`.
    fn is_called(&self, callee: &Callee, file: &Path, is_in_file: bool) -> bool {
        let is_in = |module: &String| self.file.with_extension("").iter().any(|it| it == module.as_str());
        let is_here = match &callee.qualifier {
            _ if callee.is_method => self.is_method,
            Some(qualifier) if qualifier == "Self" => self.of.is_some() && self.file == file,
            Some(qualifier) if self.of.is_some() => self.of.as_ref() == Some(qualifier),
            Some(qualifier) if ["self", "super"].contains(&qualifier.as_str()) => true,
            Some(qualifier) => is_in(qualifier),
            None => self.of.is_none() && (self.file == file || !is_in_file),
        };
        self.name == callee.name && is_here
    }
}

/// Collects the steps of a function.
struct Steps<'a> {
    fields: &'a BTreeSet<String>,
    imports: &'a BTreeMap<String, Vec<String>>,
    /// The variables of the function.
    locals: BTreeSet<String>,
    steps: Vec<Step>,
}

impl<'a> Visit<'a> for Steps<'_> {
    fn visit_local(&mut self, local: &'a Local) {
        visit::visit_local(self, local);
        let Some(init) = &local.init else { return };
        let from = self.origins(&init.expr);
        if !from.is_empty() {
            self.steps.push(Step::Bound(variables(&local.pat), from));
        }
    }

    fn visit_expr_method_call(&mut self, call: &'a ExprMethodCall) {
        let from = call.args.iter().chain([&*call.receiver]).flat_map(|it| self.origins(it)).collect();
        self.steps.push(match self.borrowed(call) {
            Some(field) => Step::Borrow(field),
            None => Step::Call(method(call), from),
        });
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_call(&mut self, call: &'a ExprCall) {
        if let Some(callee) = self.callee(call) {
            let from = call.args.iter().flat_map(|it| self.origins(it)).collect();
            self.steps.push(Step::Call(callee, from));
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_path(&mut self, path: &'a ExprPath) {
        self.steps.extend(path.path.get_ident().map(|name| Step::Use(name.to_string())));
    }
}

impl Steps<'_> {
    /// The field that a call such as `scratch()?.setup()` borrows.
    fn borrowed(&self, call: &ExprMethodCall) -> Option<String> {
        let field = call.method.to_string();
        (self.fields.contains(&field) && call.args.is_empty() && is_scratch(&call.receiver)).then_some(field)
    }

    /// The function that a call names; `None` if it is a closure, or in another crate.
    fn callee(&self, call: &ExprCall) -> Option<Callee> {
        let callee = called(call)?;
        let first = callee.qualifier.as_ref().unwrap_or(&callee.name);
        let is_ours = |path: &[String]| ["crate", "self", "super"].contains(&&*path[0]);
        match self.imports.get(first).map(Vec::as_slice) {
            _ if callee.qualifier.is_none() && self.locals.contains(&callee.name) => None,
            Some(path) if !is_ours(path) => None,
            Some([.., module, name]) if callee.qualifier.is_none() => {
                Some(Callee { name: name.clone(), qualifier: Some(module.clone()), is_method: false })
            }
            _ => Some(callee),
        }
    }

    /// The origins of the references in the value of an expression.
    fn origins(&self, expr: &Expr) -> Vec<Origin> {
        match expr {
            Expr::MethodCall(call) => match self.borrowed(call) {
                Some(field) => vec![Origin::Field(field)],
                None => vec![Origin::Result(method(call))],
            },
            // A constructor such as `Ok` returns its arguments.
            Expr::Call(call) => match called(call) {
                Some(callee) if callee.name.starts_with(char::is_uppercase) => {
                    call.args.iter().flat_map(|it| self.origins(it)).collect()
                }
                _ => self.callee(call).map(Origin::Result).into_iter().collect(),
            },
            Expr::Reference(reference) => self.of_place(&reference.expr),
            Expr::Try(it) => self.origins(&it.expr),
            Expr::Paren(it) => self.origins(&it.expr),
            Expr::Tuple(it) => it.elems.iter().flat_map(|it| self.origins(it)).collect(),
            Expr::Struct(it) => it.fields.iter().flat_map(|it| self.origins(&it.expr)).collect(),
            Expr::Block(it) => self.of_block(&it.block),
            Expr::Unsafe(it) => self.of_block(&it.block),
            Expr::If(it) => {
                let other = it.else_branch.iter().flat_map(|(_, it)| self.origins(it));
                self.of_block(&it.then_branch).into_iter().chain(other).collect()
            }
            Expr::Match(it) => it.arms.iter().flat_map(|it| self.origins(&it.body)).collect(),
            _ => Vec::new(),
        }
    }

    /// The origins of a reference to this place. For a part of a value, such as a field of a call's result, these are
    /// the origins of the whole value.
    fn of_place(&self, place: &Expr) -> Vec<Origin> {
        match place {
            Expr::Field(it) => self.of_place(&it.base),
            Expr::Index(it) => self.of_place(&it.expr),
            Expr::Unary(it) => self.of_place(&it.expr),
            it => self.origins(it),
        }
    }

    fn of_block(&self, block: &Block) -> Vec<Origin> {
        match block.stmts.last() {
            Some(Stmt::Expr(expr, None)) => self.origins(expr),
            _ => Vec::new(),
        }
    }
}

/// Whether an expression is an element of `SCRATCH`: the variable `scratch`, or a call of the function `scratch`.
fn is_scratch(expr: &Expr) -> bool {
    match expr {
        Expr::Path(it) => it.path.is_ident("scratch"),
        Expr::Call(it) => called(it).is_some_and(|callee| callee.name == "scratch"),
        Expr::Try(it) => is_scratch(&it.expr),
        Expr::MethodCall(it) => it.method == "ok" && is_scratch(&it.receiver),
        _ => false,
    }
}

fn method(call: &ExprMethodCall) -> Callee {
    Callee { name: call.method.to_string(), qualifier: None, is_method: true }
}

fn called(call: &ExprCall) -> Option<Callee> {
    let Expr::Path(path) = &*call.func else { return None };
    let mut names = path.path.segments.iter().rev().map(|it| it.ident.to_string());
    Some(Callee { name: names.next()?, qualifier: names.next(), is_method: false })
}

/// Collects the variables of patterns.
struct Variables(BTreeSet<String>);

impl<'a> Visit<'a> for Variables {
    fn visit_pat_ident(&mut self, pattern: &'a PatIdent) {
        self.0.insert(pattern.ident.to_string());
    }
}

fn variables(pattern: &Pat) -> BTreeSet<String> {
    let mut found = Variables(BTreeSet::new());
    found.visit_pat(pattern);
    found.0
}

/// Describes each borrow of a field while the function holds a reference to the same field.
fn twice_borrowed(functions: &[Function]) -> Vec<String> {
    let borrows = closure(functions, |known, function| {
        let fields = function.steps.iter().map(|step| known.borrowed_by(function, step));
        fields.flatten().collect()
    });
    let results = closure(functions, |known, function| known.resolve(function, &function.result));
    functions.iter().flat_map(|function| twice_borrowed_in(function, &borrows, &results)).collect()
}

/// For each function, a set of fields of `SCRATCH`: the fields that the function borrows, or the fields that its result
/// refers to.
struct Known<'a> {
    functions: &'a [Function],
    fields: Vec<BTreeSet<String>>,
}

impl Known<'_> {
    /// The fields of all functions that a call of `callee` in `caller` may call.
    fn of(&self, caller: &Function, callee: &Callee) -> BTreeSet<String> {
        let is_in_file = self.functions.iter().any(|it| it.file == caller.file && it.name == callee.name);
        let all = self.functions.iter().zip(&self.fields);
        let called = all.filter(|(function, _)| function.is_called(callee, &caller.file, is_in_file));
        called.flat_map(|(_, fields)| fields.clone()).collect()
    }

    fn borrowed_by(&self, caller: &Function, step: &Step) -> BTreeSet<String> {
        match step {
            Step::Borrow(field) => BTreeSet::from([field.clone()]),
            Step::Call(callee, _) => self.of(caller, callee),
            Step::Use(_) | Step::Bound(..) => BTreeSet::new(),
        }
    }

    /// The fields that references of these origins lead to.
    fn resolve(&self, caller: &Function, origins: &[Origin]) -> BTreeSet<String> {
        let of_origin = |origin: &Origin| match origin {
            Origin::Field(field) => BTreeSet::from([field.clone()]),
            Origin::Result(callee) => self.of(caller, callee),
        };
        origins.iter().flat_map(of_origin).collect()
    }
}

/// Computes the set of each function by `fields_of`, from the sets of the functions that the function calls. Repeats
/// this until no set changes.
fn closure<'a>(
    functions: &'a [Function],
    fields_of: impl Fn(&Known<'a>, &Function) -> BTreeSet<String>,
) -> Known<'a> {
    let mut known = Known { functions, fields: vec![BTreeSet::new(); functions.len()] };
    loop {
        let fields: Vec<_> = functions.iter().map(|function| fields_of(&known, function)).collect();
        if fields == known.fields {
            return known;
        }
        known.fields = fields;
    }
}

fn twice_borrowed_in(function: &Function, borrows: &Known<'_>, results: &Known<'_>) -> Vec<String> {
    let mut found = Vec::new();
    let mut report = |held: &BTreeSet<String>, step: &Step| {
        if let Some(field) = held.intersection(&borrows.borrowed_by(function, step)).next() {
            let Function { name, file, .. } = function;
            found.push(format!("{}: {name} holds {field} during {step:?}", file.display()));
        }
    };
    for (index, step) in function.steps.iter().enumerate() {
        match step {
            Step::Call(_, from) => report(&results.resolve(function, from), step),
            Step::Bound(variables, from) => {
                let held = results.resolve(function, from);
                let rebinds = |step: &Step| matches!(step, Step::Bound(names, _) if names == variables);
                let later = function.steps[index + 1..].split(rebinds).next().unwrap_or_default();
                let uses = |step: &Step| matches!(step, Step::Use(name) if variables.contains(name));
                let last = later.iter().rposition(uses).unwrap_or(0);
                later[..last].iter().for_each(|step| report(&held, step));
            }
            Step::Borrow(_) | Step::Use(_) => {}
        }
    }
    found
}
