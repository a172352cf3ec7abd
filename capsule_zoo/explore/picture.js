// A picture to drag on and to drop files on; the Python side is `Picture` in explorer.py.
// A drag is sent as one state (its number, where it began, where it is), so that the moves which a
// busy kernel misses do no harm.
function render({ model, el }) {
  const image = document.createElement("img");
  image.draggable = false;
  image.alt = model.get("label");
  image.style.cssText =
    "touch-action: none; display: block; width: clamp(280px, 30vw, 392px); max-width: 100%; height: auto";
  el.append(image);

  const paint = () => {
    URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(new Blob([model.get("png")], { type: "image/png" }));
  };
  model.on("change:png", paint);
  paint();

  const position = (event) => {
    const box = image.getBoundingClientRect();
    const along = (at, begin, length) => (2 * (at - begin)) / length - 1;
    return [along(event.clientX, box.left, box.width), along(event.clientY, box.top, box.height)];
  };
  let drag = null;
  const send = (event) => {
    model.set("drag", { ...drag, end: position(event) });
    model.save_changes();
  };
  image.onpointerdown = (event) => {
    image.setPointerCapture(event.pointerId);
    drag = { number: Date.now(), start: position(event) };
    send(event);
  };
  image.onpointermove = (event) => drag && send(event);
  image.onpointerup = image.onpointercancel = () => (drag = null);

  image.ondragover = (event) => event.preventDefault();
  image.ondrop = async (event) => {
    event.preventDefault();
    const file = event.dataTransfer.files[0];
    if (file) model.send({ dropped: file.name }, undefined, [await file.arrayBuffer()]);
  };
  return () => URL.revokeObjectURL(image.src);
}

export default { render };
